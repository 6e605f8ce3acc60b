"""Task B of distillation, and the prediction of x* beside the labels."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing import assert_close

from concord.distillation import AuxiliaryPrediction, Distillation, of_labels, with_privileged
from concord.environments import BatchStream, Environments
from concord.errors import InputError
from concord.objectives import ERM
from concord.record import Evaluation
from concord.training import Job, ProcessContext, Run, TrainConfig, load_job, train
from concord.training.context import Silent
from concord_jobs.distill_logits.tables import curves_figure

FILE = load_job("distill-logits")
CLASSES = 4


def metrics_of(given: Job[Any], config: TrainConfig, process: ProcessContext | None = None) -> dict[str, float]:
    return train(given, config, process or ProcessContext(), Silent()).metrics


# --- the task


def targets_of(name: str, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, labels, logits, x*."""
    config = FILE.job.config.with_options(teacher="none", **options)
    inputs, targets = FILE.job.environments(config)[name].data
    return inputs, targets[:, 0].long(), targets[:, 1 : 1 + CLASSES], targets[:, 1 + CLASSES :]


def test_the_privileged_numbers_tell_the_distribution_of_the_label_exactly() -> None:
    """pinv(B) x* are the logits, with B found by what the oracle teacher holds."""
    config = FILE.job.config.with_options(teacher="oracle")
    objective = FILE.job.objective(config)
    objective.begin(FILE.job.model(config), 1, 1)
    _, _, logits, privileged = targets_of("train")
    assert privileged.shape == (1000, 32)
    assert_close(objective.module(privileged).softmax(1), logits.softmax(1), rtol=1e-5, atol=1e-6)


def test_labels_are_drawn_from_the_softmax_of_linear_logits() -> None:
    inputs, labels, logits, _ = targets_of("train", examples=40_000)
    mixing = torch.linalg.lstsq(inputs, logits).solution.T
    assert_close(inputs @ mixing.T, logits, rtol=1e-3, atol=1e-3)
    assert float(mixing.abs().max()) <= 3 / 128**0.5 + 1e-5
    probability = logits.softmax(1)
    for of in range(CLASSES):  # calibrated, over all and where the class is likely
        for chosen in (torch.ones(len(labels), dtype=torch.bool), probability[:, of] > 0.5):
            expected = float(probability[chosen, of].mean())
            assert float((labels[chosen] == of).float().mean()) == pytest.approx(expected, abs=0.02)
    # A uniform guess is as far off as figure 4.4 begins.
    uniform = (probability * (probability.log() + torch.tensor(CLASSES).log())).sum(1).mean()
    assert float(uniform) == pytest.approx(0.52, abs=0.05)


def test_nobody_knows_what_is_privileged_where_nothing_is_trained() -> None:
    for name in ("validation", "test"):
        assert not targets_of(name)[3].any()
    parts = [targets_of(name)[0] for name in ("train", "validation", "test")]
    assert not any(torch.equal(one, other) for one in parts for other in parts if one is not other)


def test_the_measure_is_the_divergence_from_the_true_distribution() -> None:
    inputs, _, logits, _ = targets_of("test")
    _, targets = FILE.job.environments(FILE.job.config)["test"].data
    outputs = torch.randn(len(inputs), CLASSES, generator=torch.Generator().manual_seed(0))
    p, q = logits.double().softmax(1), outputs.double().softmax(1)
    found = FILE.job.measures["kl"](outputs, targets)
    assert_close(found.double(), (p * (p / q).log()).sum(1), rtol=1e-4, atol=1e-5)
    assert_close(FILE.job.measures["kl"](logits, targets), torch.zeros(len(inputs)), atol=1e-6, rtol=0)


def test_the_entropy_is_subtracted_with_its_weight() -> None:
    _, targets = FILE.job.environments(FILE.job.config)["test"].data
    outputs = torch.randn(len(targets), CLASSES)
    objective = FILE.job.objective(FILE.job.config.with_options(teacher="none", entropy_weight=0.7))
    found, _ = objective.terms(nn.Identity(), (outputs[None], targets[None]))
    entropy = torch.distributions.Categorical(logits=outputs).entropy().mean()
    assert_close(found[0], cross_entropy(outputs, targets[:, 0].long()) - 0.7 * entropy)


@pytest.mark.parametrize("resample", [True, False])
def test_task_b_trains_differently_with_every_teacher(resample: bool) -> None:
    options = {"examples": 64, "batch_size": 16, "epochs": 1, "student_steps": 2, "unrolled_steps": 3}
    found = set()
    for teacher in ("meta", "none", "fixed", "oracle"):
        config = FILE.job.config.with_options(teacher=teacher, resample_split=resample, **options)
        config.check()
        objective = FILE.job.objective(config)
        assert type(objective) is (ERM if teacher == "none" else Distillation)
        assert (getattr(objective, "meta", None) is not None) == (teacher == "meta")
        found.add(metrics_of(FILE.job, config)["validation_kl"])
    assert min(found) > 0
    assert len(found) == 4


def test_the_split_holds_back_half_of_the_examples() -> None:
    assert len(FILE.job.environments(FILE.job.config)["train"].inputs) == 500
    assert len(FILE.job.environments(FILE.job.config.with_options(teacher="none"))["train"].inputs) == 1000


# --- predicting x* beside the labels


BY_LABEL = of_labels(lambda outputs, labels: mse_loss(outputs.squeeze(1), labels))


def examples(name: str) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(40, 8, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    return drawn[:, :4], with_privileged(drawn[:, 0] * drawn[:, 1], drawn[:, 4:7] + drawn[:, :1])


def model(_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def predicting(weight: float = 2.0, layer: str = "1", outputs: int = 3) -> AuxiliaryPrediction:
    return AuxiliaryPrediction(BY_LABEL, lambda: nn.Linear(5, outputs), weight, layer)


def job(objective: Any) -> Job[Any]:
    data = Environments(examples, train=["a", "b"], test=["test"])
    return Job(lambda _: data, model, BY_LABEL, objective=lambda _: objective, criterion="ood_loss", mode="min")


CONFIG = TrainConfig().with_options(
    epochs=2, batch_size=8, held_out=0.0, lr=1e-2, evaluations=2, checkpoints=1, aggregator="mean", milestones=()
)


def test_predicting_beside_the_labels_is_the_plain_loop() -> None:
    objective = predicting()
    given = job(objective)
    torch.manual_seed(CONFIG.run.seed)
    plain = model(None)
    head = nn.Linear(5, 3)
    adam = torch.optim.Adam([*plain.parameters(), *head.parameters()], 1e-2)
    stream = BatchStream([given.environments(CONFIG)[name] for name in "ab"], 8, CONFIG.run.seed)
    for step in range(10):
        inputs, targets = stream.batch(step)
        hidden = torch.tanh(plain[0](inputs))
        losses = [
            BY_LABEL(plain[2](hidden[index]), targets[index]) + 2 * mse_loss(head(hidden[index]), targets[index, :, 1:])
            for index in range(2)
        ]
        adam.zero_grad()
        torch.stack(losses).mean().backward()
        adam.step()
    expected = BY_LABEL(plain(examples("test")[0]), examples("test")[1]).item()
    assert metrics_of(given, CONFIG)["ood_loss"] == pytest.approx(expected, rel=1e-5)
    assert_close(objective.module.weight, head.weight, rtol=1e-5, atol=1e-6)


def test_a_weight_of_0_learns_as_from_the_labels_alone() -> None:
    assert metrics_of(job(predicting(0.0)), CONFIG)["ood_loss"] == pytest.approx(
        metrics_of(job(ERM(BY_LABEL)), CONFIG)["ood_loss"], rel=1e-5
    )


def test_what_cannot_be_predicted_is_refused_in_a_line() -> None:
    for call, said in [
        (lambda: predicting(-1.0), "auxiliary_weight=-1.0: must be a finite number, not below 0"),
        (lambda: metrics_of(job(predicting(layer="9")), CONFIG), "layers=9: the model has no such layer; there are 0"),
        (lambda: metrics_of(job(predicting(outputs=2)), CONFIG), r"head: gives \(8, 2\); x\* has \(8, 3\)"),
    ]:
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("name", ["distill-xor", "distill-logits"])
def test_a_job_predicts_what_is_privileged(name: str) -> None:
    given = load_job(name).job
    small = given.config.with_options(examples=64, batch_size=16, epochs=1, teacher="none")
    predicts = small.with_options(auxiliary_weight=1.0)
    predicts.check()
    assert metrics_of(given, predicts)["ood_loss"] != metrics_of(given, small)["ood_loss"]


def test_the_figure_has_a_line_a_row_with_the_mean_over_seeds() -> None:
    def run(seed: int, values: tuple[float, ...]) -> Run:
        history = [Evaluation(epoch, epoch, {"ood_kl": value}) for epoch, value in enumerate(values, 1)]
        return Run.of(history, seed, {})

    runs = {"LDT": [run(1, (0.5, 0.1)), run(2, (0.3, 0.3))], "no teacher": [run(1, (0.4, 1.0))]}
    axes = curves_figure(runs).axes[0]
    assert [line.get_label() for line in axes.lines] == list(runs)
    assert_close(torch.tensor(axes.lines[0].get_xydata()), torch.tensor([[1.0, 0.4], [2.0, 0.2]]).double())
