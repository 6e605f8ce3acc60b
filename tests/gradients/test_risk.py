"""Any batch and any risk: a batch may be a dictionary, and the risk any function of it."""

import copy
from typing import Any

import pytest
import torch
from own_rules import assert_gradients
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from concord.aggregation import AndMask, Mean, SandMask, Statistic, Statistics, Update, aggregate
from concord.errors import ArgumentError, InputError
from concord.gradients import PerExampleGradients, StackedGradients, Supervised
from concord.gradients.risk import as_risk

ENVIRONMENTS, BATCH, WORDS = 5, 3, 6


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # seconds, in every process that reads this file

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(vocab_size=20, max_position_embeddings=WORDS, num_labels=3, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config._attn_implementation = "eager"
    return BertForSequenceClassification(config).double()


def tokens(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (ENVIRONMENTS, BATCH, WORDS)
    lengths = torch.randint(2, WORDS + 1, (ENVIRONMENTS, BATCH, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, 20, shape, generator=generator),
        "attention_mask": (torch.arange(WORDS) < lengths).long(),
        "labels": torch.randint(0, 3, shape[:2], generator=generator),
    }


def risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def of(batch: Any, environment: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[environment], batch)


def looped(model: nn.Module, risk: Any, rule: Any, batch: Any, environments: int) -> list[Tensor]:
    """The rule applied to a loop over environments."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    rows = []
    for environment in range(environments):
        result = risk(model, of(batch, environment), 0)
        mean = result[0] / result[1] if isinstance(result, tuple) else result
        rows.append(torch.autograd.grad(mean, parameters, allow_unused=True, materialize_grads=True))
    return [aggregate(rule, torch.stack(each)).value for each in zip(*rows, strict=True)]


@pytest.mark.parametrize("vectorize", [True, False, None])
@pytest.mark.parametrize("rule", [AndMask(0.6), SandMask(0.2)], ids=["and-mask", "sand-mask"])
def test_a_hugging_face_classifier_trains_on_dictionaries_of_tokens(rule: Any, vectorize: bool | None) -> None:
    from transformers import BatchEncoding

    model, batch = classifier(), tokens()
    gradients = StackedGradients(model, risk, rule, vectorize=vectorize)
    for given in (batch, BatchEncoding(batch)):  # as a tokenizer gives it
        step = gradients(given)
        assert_gradients(model, looped(model, risk, rule, batch, ENVIRONMENTS), rtol=1e-8, atol=1e-12)
    assert_close(step.losses, torch.stack([risk(model, of(batch, e), 0) for e in range(ENVIRONMENTS)]).detach())
    assert step.weights.tolist() == [BATCH] * ENVIRONMENTS


def weighted(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """A sum over words, and how many there are: batches differ in weight."""
    losses = (model(batch["inputs"]) - batch["targets"]).square().mean(-1)
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ENVIRONMENTS, BATCH, WORDS, 4, generator=generator, dtype=torch.float64)
    mask = (torch.rand(ENVIRONMENTS, BATCH, WORDS, generator=generator) < 0.6).double()
    mask[:, 0, 0] = 1
    targets = torch.randn(ENVIRONMENTS, BATCH, WORDS, 2, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "targets": targets, "mask": mask}


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_sum_and_its_weight_are_a_mean(vectorize: bool) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2).double(), sequences()
    step = StackedGradients(model, weighted, AndMask(0.6), vectorize=vectorize)(batch)
    assert_gradients(model, looped(model, weighted, AndMask(0.6), batch, ENVIRONMENTS))
    assert_close(step.weights, batch["mask"].sum((1, 2)).float())
    # One environment's mean over several processes or batches is that of all its words.
    pooled = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), batch)
    total, weight = weighted(model, pooled, 0)
    assert_close((step.losses * step.weights).sum() / step.weights.sum(), (total / weight).detach())


def test_the_mean_over_examples_of_a_weighted_risk_is_its_gradient() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2).double(), sequences()
    PerExampleGradients(model, weighted, Mean())(batch)
    pooled = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), batch)
    total, weight = weighted(model, pooled, 0)
    assert_gradients(model, torch.autograd.grad(total / weight, list(model.parameters())))


def test_the_risk_is_told_the_step() -> None:
    steps: list[int] = []

    def counted(model: nn.Module, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        steps.append(step)
        return mse_loss(model(batch[0]), batch[1])

    gradients = StackedGradients(nn.Linear(4, 2), counted, Mean(), vectorize=False)
    batch = torch.randn(1, 3, 4), torch.randn(1, 3, 2)
    gradients(batch)
    gradients(batch, 7)
    gradients(*batch, step=9)
    gradients(*batch)
    assert steps == [0, 7, 9, 10]


def test_a_function_of_three_is_a_risk_and_anything_else_a_loss() -> None:
    assert as_risk(risk) is risk
    for loss in (cross_entropy, nn.CrossEntropyLoss(), lambda outputs, targets: (outputs - targets).mean()):
        assert as_risk(loss) == Supervised(loss)


# What is refused


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.ones(2, 3, 4), "y": torch.ones(2, 4)}, r"\['x'\] \(2, 3, 4\), \['y'\] \(2, 4\); all must begin"),
        ({"x": torch.ones(2)}, r"\['x'\] \(2,\); all must begin with the same \(environments, examples\)"),
        ({"x": torch.ones(0, 3), "y": torch.ones(0, 3)}, "at least one of each"),
        ({"x": torch.ones(2, 3), "y": "text"}, "batch: holds str; expected a tree of tensors"),
        ({}, "batch: holds nothing; expected a tree of tensors"),
        ((torch.ones(2, 3), torch.ones(3, 2)), r"inputs \(2, 3\), targets \(3, 2\); all must begin"),
    ],
)
def test_a_batch_whose_parts_do_not_fit_is_refused(batch: Any, said: str) -> None:
    for source in (StackedGradients, PerExampleGradients):
        with pytest.raises(InputError, match=said):
            source(nn.Linear(4, 2), risk, Mean())(batch)


def test_a_batch_that_changes_its_structure_is_refused() -> None:
    model, batch = classifier(), tokens()
    gradients = StackedGradients(model, risk, Mean())
    gradients(batch)
    with pytest.raises(InputError, match=r"batch: its structure was .*attention_mask.*, and is now "):
        gradients({name: leaf for name, leaf in batch.items() if name != "attention_mask"})


def test_a_dictionary_with_a_loss_of_outputs_and_targets_is_refused() -> None:
    with pytest.raises(InputError, match=r"batch of type dict: a loss needs \(inputs, targets\)"):
        StackedGradients(classifier(), cross_entropy, Mean(), vectorize=False)(tokens())


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: x, r"risk: gives \(3, 2\); expected a scalar, the mean over the batch, or a sum and its weight"),
        (lambda x: (x.sum(), x), r"risk: gives \(\), \(3, 2\); expected"),
        (lambda x: 0.5, r"risk: gives float; expected"),
        (lambda x: (x.sum(), x.sum(), x.sum()), r"risk: gives \(\), \(\), \(\); expected"),
        (lambda x: (x.sum(), x.new_zeros(())), "risk: its weight is 0; a sum needs a weight above 0"),
        (lambda x: (x.sum(), -x.new_ones(())), "risk: its weight is -1; a sum needs a weight above 0"),
    ],
)
@pytest.mark.parametrize("source", [StackedGradients, PerExampleGradients])
def test_a_risk_that_is_no_mean_is_refused(source: Any, result: Any, said: str) -> None:
    def wrong(model: nn.Module, batch: tuple[Tensor, Tensor], step: int) -> Any:
        return result(model(batch[0]))

    with pytest.raises(InputError, match=said):
        source(nn.Linear(4, 2), wrong, Mean())((torch.randn(1, 3, 4), torch.randn(1, 3, 2)))


def test_the_loss_of_single_examples_needs_a_loss() -> None:
    with pytest.raises(ArgumentError, match=r"definition=loss: needs a loss\(outputs, targets\) in place of a risk"):
        PerExampleGradients(nn.Linear(4, 2), risk, Mean(), definition="loss")


# What is not finite, and scaled losses


class Clip:
    """Of its statistic nothing is known: neither how it acts on products, nor its degree."""

    statistics = (Statistic("clipped", lambda gradient: gradient.clamp(-0.05, 0.1)),)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["clipped"] / environments, torch.ones_like(sums["clipped"]))


class Votes:
    """A finish that swallows what is not finite."""

    statistics = (Statistic("sign", torch.sign, whole=1),)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["sign"].nan_to_num().clamp(-1, 1)
        return Update(value, torch.ones_like(value))


def pair(overflows: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ENVIRONMENTS, 4, 6, generator=generator)
    targets = torch.randn(ENVIRONMENTS, 4, 2, generator=generator)
    if overflows:
        inputs[2] *= 1e30
    return inputs, targets


@pytest.mark.parametrize("vectorize", [True, False, "pooled"])
@pytest.mark.parametrize("rule", [AndMask(0.6), Votes()], ids=["and-mask", "votes"])
def test_what_is_not_finite_is_left_in_where_it_is_to_propagate(rule: Any, vectorize: Any) -> None:
    model = nn.Linear(6, 2)
    gradients = StackedGradients(model, mse_loss, rule, nonfinite="propagate", vectorize=vectorize)
    assert gradients(pair(overflows=True)).skipped == ()
    assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())
    gradients(pair())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("source", [StackedGradients, PerExampleGradients])
@pytest.mark.parametrize("rule", [AndMask(0.6), SandMask(0.2), Clip()], ids=["and-mask", "sand-mask", "clip"])
def test_a_scaler_scales_the_update_of_unscaled_gradients(rule: Any, source: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    plain, scaled = copy.deepcopy(model), copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    source(plain, mse_loss, rule)(pair())
    gradients = source(scaled, mse_loss, rule, scaler=scaler)
    gradients(pair())
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert_close(other.grad, 1024 * one.grad, rtol=1e-4, atol=1e-3)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    before = copy.deepcopy(scaled.state_dict())
    gradients(pair(overflows=True))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert_close(scaled.state_dict(), before, rtol=0, atol=0)


def test_environments_are_skipped_only_if_the_scale_is_not_to_blame() -> None:
    """With a scaler that never sees what is not finite, its scale would grow until nothing is left."""
    model = nn.Linear(6, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = StackedGradients(model, mse_loss, AndMask(0.6), nonfinite="skip", scaler=scaler)
    skipped = []
    for _ in range(4):
        skipped.append(gradients(pair(overflows=True)).skipped)
        scaler.step(optimizer)
        scaler.update()
    assert skipped == [(), (), ("environment 2",), ()]
    assert scaler.get_scale() <= 2


def test_an_unknown_answer_to_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ArgumentError, match="nonfinite=ignore: must be one of raise, skip, propagate"):
        StackedGradients(nn.Linear(2, 2), mse_loss, Mean(), nonfinite="ignore")  # type: ignore[arg-type]


def test_the_variance_of_the_sand_mask_does_not_cancel() -> None:
    """32 environments that differ by 1e-3 of their mean, and by 1e-5: what float32 sums of squares cannot tell."""
    generator = torch.Generator().manual_seed(0)
    for spread, tolerance in ((1e-3, 1e-3), (1e-5, 5e-2)):
        gradients = 3 + 3 * spread * torch.randn(32, 500, generator=generator)
        rule = SandMask(0.0, steepness=float((3 * spread) ** 2))
        expected = torch.tanh(rule.steepness / gradients.double().var(0))
        assert_close(aggregate(rule, gradients).kept.double(), expected, rtol=tolerance, atol=0)
