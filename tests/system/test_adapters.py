"""The AND-mask in a training with Lightning, Hugging Face's Trainer or Accelerate, as the pages have it.

The pages are docs/from-lightning.md and docs/loops.md.
"""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_processes
from ports import free_port
from test_readme import snippet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from concord.aggregation import AndMask, Mean
from concord.errors import InputError
from concord.gradients import StackedGradients, per_example, register_aggregation_hook

LIGHTNING = """
class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(10, 2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def training_step(self, batch, index):
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


torch.manual_seed(0)
hospitals = ["north", "south", "east"] * 40
patients = [(torch.randn(10), int(torch.rand(()) < 0.5), hospital) for hospital in hospitals]
loader = DataLoader(patients, batch_size=24, shuffle=True)
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(model, loader)
print(trainer.callback_metrics["loss"])
"""
TRAINER = """
torch.manual_seed(0)
sites = ["books", "films", "games"] * 16
reviews = [
    {"input_ids": torch.randint(1, 20, (6,)).tolist(), "labels": place % 2, "site": site}
    for place, site in enumerate(sites)
]
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.0)
model = BertForSequenceClassification(BertConfig(vocab_size=20, attention_probs_dropout_prob=0.0, **sizes))
arguments = TrainingArguments(
    "output", max_steps=4, learning_rate=1e-3, logging_steps=1, save_strategy="no", use_cpu=True
)
trainer = Trainer(model, arguments, train_dataset=reviews)
trainer.train()
print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
"""
ACCELERATE = """
torch.manual_seed(0)
patients = [(torch.randn(10), int(torch.rand(()) < 0.5), place % 3) for place in range(120)]
loader = DataLoader(patients, batch_size=24, shuffle=True)
model = torch.nn.Linear(10, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(loss)
"""
WITH_RULE = {
    "lightning": snippet("lightning"),
    "trainer": snippet("trainer"),
    "accelerate": snippet("accelerate"),
}
PLAIN = {"lightning": LIGHTNING, "trainer": TRAINER, "accelerate": ACCELERATE}
# Batches of the same examples, so that the losses can be compared.
SAME = {
    "lightning": ("batch_size=24, shuffle=True", "batch_sampler=EnvironmentSampler(hospitals, 8)"),
    "trainer": ("trainer = Trainer(", "trainer = Sampled("),
    "accelerate": ("batch_size=24, shuffle=True", "batch_sampler=EnvironmentSampler([0, 1, 2] * 40, 8)"),
}
PREAMBLE = """
from concord.aggregation import Mean
from concord.environments import EnvironmentSampler
"""
SAMPLED = """
class Sampled(Trainer):
    def get_train_dataloader(self):
        sampler = EnvironmentSampler([review["site"] for review in self.train_dataset], batch_size=8)
        without = [{name: review[name] for name in ("input_ids", "labels")} for review in self.train_dataset]
        return DataLoader(without, batch_sampler=sampler, collate_fn=self.data_collator)
"""


def imports(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if re.match("import|from", line)) + "\n"


def trained(text: str) -> tuple[list[torch.Tensor], str]:
    """The weights at the end of a program, and what it printed."""
    printed: list[str] = []
    known: dict[str, Any] = {"print": lambda *parts: printed.extend(map(str, parts))}
    exec(text, known)
    return [parameter.detach() for parameter in known["model"].parameters()], printed[-1]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_the_mean_has_the_same_losses_as_no_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, (old, new) = WITH_RULE[name], SAME[name]
    with_rule = trained(text)
    averaged = re.sub(r"AndMask\(.*?\)", "Mean()", text).replace(old, new)
    weights, printed = trained(PREAMBLE + averaged)
    assert old in PLAIN[name]
    plain = PREAMBLE + imports(text) + (SAMPLED if name == "trainer" else "") + PLAIN[name].replace(old, new)
    expected, expected_print = trained(plain)
    for found, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
    found, other = numbers(printed), numbers(expected_print)
    assert sum(found) / len(found) == pytest.approx(sum(other) / len(other), rel=1e-4)
    assert any(not torch.equal(*pair) for pair in zip(with_rule[0], weights, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_the_mask_takes_at_most_ten_lines(name: str) -> None:
    plain = {line.strip() for line in PLAIN[name].splitlines()}
    added = [line for line in WITH_RULE[name].splitlines() if line.strip() and line.strip() not in plain]
    assert len([line for line in added if line not in imports(WITH_RULE[name]).splitlines()]) <= 10


def processes_of_two(function: Any, folder: Path) -> None:
    """Call the function in two processes, with the variables that torchrun gives."""
    run_processes(_process, 2, function, folder, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, str(free_port()))


def _process(rank: int, function: Any, folder: Path, place: dict[str, str], port: str) -> None:
    os.environ.update({**place, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.manual_seed(rank)  # a process's own examples
    data = torch.randn(6, 8, 4), torch.randint(0, 2, (6, 8))
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    torch.save([function(copy.deepcopy(network), data, rule) for rule in (None, Mean())], folder / f"{rank}.pt")


def by_lightning(network: nn.Linear, data: tuple[torch.Tensor, ...], rule: Any) -> list[torch.Tensor]:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return cross_entropy(self.network(batch[0]), batch[1])

    known: dict[str, Any] = {"rule": rule}
    exec(snippet("lightning-hook").replace("AndMask(threshold=1.0)", "rule"), known)
    hospitals = [TensorDataset(*(part.flatten(0, 1) for part in data))] * 2  # this process has its own
    lightning.Trainer(
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        callbacks=[known["Aggregated"]()] if rule else [],
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
    ).fit(Classifier(), datamodule=known["Hospitals"](hospitals))
    return [parameter.detach() for parameter in network.parameters()]


def by_accelerate(network: nn.Linear, data: tuple[torch.Tensor, ...], rule: Any) -> list[torch.Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(network, torch.optim.Adam(network.parameters(), lr=0.1))
    if rule:
        register_aggregation_hook(model, rule)
    for inputs, targets in zip(*data, strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in network.parameters()]


@pytest.mark.parametrize("function", [by_lightning, by_accelerate])
def test_the_hook_with_the_mean_trains_as_ddp_does(function: Any, tmp_path: Path) -> None:
    """With clipping and accumulation."""
    processes_of_two(function, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for without, hooked, other in zip(*first, second[1], strict=True):
        torch.testing.assert_close(hooked, without, rtol=1e-5, atol=1e-6)
        assert torch.equal(hooked, other)  # of the other process


# ---- what the page says of clipping, accumulation, mixed precision and zero_grad

INPUTS, TARGETS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair)


def backward(model: nn.Module, part: slice = slice(None), factor: float = 1.0) -> None:
    (cross_entropy(model(INPUTS[part]), TARGETS[part]) * factor).backward()


def aggregated(*passes: tuple[slice, float], **options: Any) -> list[torch.Tensor]:
    """The gradients of per_example with these passes."""
    model = network()
    examples = per_example(model, AndMask(threshold=0.2), **options)
    for part, factor in passes:
        backward(model, part, factor)
    examples.aggregate()
    return gradients(model)


def test_stacked_gradients_replace_those_that_are_there() -> None:
    model = network()
    source = StackedGradients(model, cross_entropy, AndMask(threshold=0.5))
    batch = INPUTS.view(3, 8, 4), TARGETS.view(3, 8)
    source(batch)
    expected = gradients(model)
    source((batch[0] + 1, batch[1]))
    source(batch)  # accumulates nothing, and needs no zero_grad()
    close(gradients(model), expected)


def test_per_example_sums_passes_before_aggregate() -> None:
    whole = aggregated((slice(None), 1.0))
    parts = [slice(0, 8), slice(8, 24)]
    close(aggregated(*((part, 1.0) for part in parts)), whole)
    divided = aggregated(*((part, 0.5) for part in parts))  # by the number of passes
    close([2 * gradient for gradient in divided], whole)


def test_zero_grad_before_aggregate_drops_the_batch() -> None:
    model = network()
    examples = per_example(model, AndMask(threshold=0.2))
    backward(model, slice(8, 24))
    model.zero_grad()
    backward(model)
    examples.aggregate()
    close(gradients(model), aggregated((slice(None), 1.0)))
    with pytest.raises(InputError, match=r"zero_grad\(\) was not called since the last aggregate"):
        backward(model)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("largest", [0.01, 1e6])
def test_clipping_before_aggregate_is_refused_by_its_name(first: int, largest: float) -> None:
    model = network()
    examples = per_example(model, AndMask(threshold=0.2))
    for step in range(first + 1):
        model.zero_grad()
        backward(model)
        if step == first:
            nn.utils.clip_grad_norm_(model.parameters(), largest)
            with pytest.raises(InputError, match=r"0\.weight: its gradient was changed after backward, as by clipping"):
                examples.aggregate()
        else:
            examples.aggregate()
    model.zero_grad()
    backward(model)
    examples.aggregate()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert nn.utils.get_total_norm(gradients(model)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("given", [True, False])
def test_a_scaler_finds_the_gradients_scaled(given: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = network()
    examples = per_example(model, AndMask(threshold=0.2), **({"scaler": scaler} if given else {}))
    scaler.scale(cross_entropy(model(INPUTS), TARGETS)).backward()
    examples.aggregate(scale=None if given else scaler.get_scale())
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    close(gradients(model), aggregated((slice(None), 1.0)))

    stacked, batch = network(), (INPUTS.view(3, 8, 4), TARGETS.view(3, 8))
    StackedGradients(stacked, cross_entropy, AndMask(threshold=0.5), scaler=scaler)(batch)
    unscaled = network()
    StackedGradients(unscaled, cross_entropy, AndMask(threshold=0.5))(batch)
    close([gradient / 1024 for gradient in gradients(stacked)], gradients(unscaled))


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_stacked_gradients_under_autocast_are_those_with_the_option(vectorize: bool | None) -> None:
    batch = INPUTS.view(3, 8, 4), TARGETS.view(3, 8)
    found, expected, full = network(), network(), network()
    with torch.autocast("cpu", torch.bfloat16):
        StackedGradients(found, cross_entropy, AndMask(threshold=0.5), vectorize=vectorize)(batch)
    half = {"autocast": torch.bfloat16, "vectorize": vectorize}
    StackedGradients(expected, cross_entropy, AndMask(threshold=0.5), **half)(batch)
    StackedGradients(full, cross_entropy, AndMask(threshold=0.5), vectorize=vectorize)(batch)
    for pair in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(*pair) for pair in zip(gradients(found), gradients(full), strict=True))


@pytest.mark.parametrize("replaced", [False, True])
def test_gradients_changed_between_passes_are_refused(replaced: bool) -> None:
    model = network()
    examples = per_example(model, AndMask(threshold=0.2))
    backward(model, slice(0, 8))
    weight = next(model.parameters())
    assert weight.grad is not None
    if replaced:
        weight.grad = weight.grad / 2
    else:
        weight.grad /= 2
    with pytest.raises(InputError, match=r"0\.weight: its gradient was changed after backward, as by clipping"):
        backward(model, slice(8, 24))
    examples.discard()


@pytest.mark.filterwarnings("ignore")
def test_in_lightning_and_the_trainer_per_example_comes_before_clipping(tmp_path: Path) -> None:
    import lightning
    from transformers import Trainer, TrainingArguments

    class Aggregating(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def on_fit_start(self) -> None:
            self.examples = per_example(self.network, AndMask(threshold=0.2))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return cross_entropy(self.network(batch[0]), batch[1]) * 3  # it divides by the number of passes

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.examples.aggregate()

    of_lightning = Aggregating()
    lightning.Trainer(
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=0.01,
        accumulate_grad_batches=3,
    ).fit(of_lightning, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": cross_entropy(self.network(inputs), labels) * 3}

    class PerExampleTrainer(Trainer):
        def training_step(self, *arguments: Any) -> torch.Tensor:
            loss = super().training_step(*arguments)
            if self.accelerator.sync_gradients:
                self.examples.aggregate()
            return loss

    model = Loss()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        save_strategy="no",
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=3,
        max_grad_norm=0.01,
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"inputs": x.tolist(), "labels": int(y)} for x, y in zip(INPUTS, TARGETS, strict=True)]
    trainer = PerExampleTrainer(model, arguments, train_dataset=rows)
    trainer.examples = per_example(model, AndMask(threshold=0.2))
    trainer.train()

    expected = aggregated((slice(None), 1.0))
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert norm > 0.01
    for trained in (of_lightning.network, model.network):
        moved = [
            before - after.detach() for before, after in zip(network().parameters(), trained.parameters(), strict=True)
        ]
        for found, gradient in zip(moved, expected, strict=True):
            torch.testing.assert_close(found.detach(), gradient * 0.01 / norm, rtol=1e-3, atol=1e-6)
