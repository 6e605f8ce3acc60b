"""The synthetic memorization task reproduces the paper's claims: small here, in full under -m slow."""

import csv
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concord.aggregation import TMask
from concord.environments import BatchStream
from concord.errors import InputError
from concord.models import MLP
from concord.options import option_values, options_of
from concord.studies.job_tables import comparisons_of
from concord.studies.search import derived
from concord.training import ProcessContext, Run, load_job, train
from concord.training.context import Silent
from concord.training.process import tune_process
from concord_jobs.synthetic.correlations import (
    Correlation,
    Moments,
    Summary,
    gradient_correlations,
    summarize,
    write_correlations,
)
from concord_jobs.synthetic.figures import data_figure, oracle
from concord_jobs.synthetic.spirals import Spirals

JOB = load_job("synthetic").job
THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 1.0)


def config(**changes: Any) -> Any:
    return JOB.config.with_options(**changes)


def accuracies(aggregator: str, seeds: range, **changes: Any) -> dict[str, list[float]]:
    tune_process()
    wanted = [config(aggregator=aggregator, seed=seed, evaluations=1, **changes) for seed in seeds]
    runs = [train(JOB, each, ProcessContext(), Silent()).metrics for each in wanted]
    return {metric: [run[metric] for run in runs] for metric in ("train_accuracy", "ood_accuracy")}


def test_the_and_mask_finds_the_mechanism_and_the_average_shortcuts() -> None:
    """One revolution, 16 environments and an eighth of the steps: easy enough for seconds."""
    small = {"environments": 16, "revolutions": 1.0, "examples": 512, "batch_size": 64, "epochs": 15}
    masked = accuracies("and-mask", range(1), **small)
    averaged = accuracies("mean", range(1), **small | {"epochs": 5})  # it is quicker
    assert masked["ood_accuracy"][0] > 0.95
    assert averaged["train_accuracy"][0] > 0.99
    assert averaged["ood_accuracy"][0] < 0.75


@pytest.mark.parametrize(("environments", "there_is_one"), [(4, True), (10, True), (32, True), (100, False)])
def test_a_linear_shortcut_holds_in_as_many_environments_as_dimensions(environments: int, there_is_one: bool) -> None:
    """So nothing in those environments refutes it: only environments that did not train do."""
    from scipy.optimize import linprog

    for seed in (101, 102, 103):
        spirals = Spirals(environments=environments, examples=1, seed=seed)
        names = spirals.as_environments().train
        of_class_1 = [(2 * targets[0] - 1) * inputs[0, 2:] for inputs, targets in map(spirals.load, names)]
        # w with wᵀs ≥ 1 for the shortcuts s of class 1 in every environment; those of class 0 are -s.
        asked = np.stack([shortcuts.numpy() for shortcuts in of_class_1])
        free = [(None, None)] * asked.shape[1]
        found = linprog(np.zeros(asked.shape[1]), A_ub=-asked, b_ub=-np.ones(environments), bounds=free)
        assert (found.status == 0) == there_is_one


def test_cross_entropy_of_one_logit_is_binary_cross_entropy() -> None:
    made = JOB.model(config(one_logit=True))
    inputs, targets = torch.randn(64, 34), torch.randint(0, 2, (64,))
    logit = made.network(inputs)[:, 0]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logit, targets.float())
    torch.testing.assert_close(torch.nn.functional.cross_entropy(made(inputs), targets), expected)
    assert torch.equal(made(inputs).argmax(1), (logit > 0).long())
    assert JOB.model(config())(inputs).shape == (64, 2)


def test_agreement_raises_the_mechanisms_part_of_the_gradient() -> None:
    """Fig. 7 in small: ρ with the mechanism's gradient at τ = 0, at τ = 0.6, and under the XOR-mask."""
    spirals = Spirals(environments=16, examples=512).as_environments()
    batch = BatchStream(spirals.load(spirals.train), 512, seed=0).batch(0)
    found = [
        each
        for seed in range(3)
        for each in gradient_correlations(
            lambda: MLP(34, 2, initialization="default"), *batch, 2, [0.0, 0.3, 0.6, 1.0], seed
        )
    ]

    def rho(mask: str, threshold: float, signal: str) -> float:
        return summarize(c for c in found if (c.mask, c.threshold, c.signal) == (mask, threshold, signal)).mean

    plain = rho("and-mask", 0.0, "mechanism")
    assert rho("and-mask", 0.6, "mechanism") > plain + 0.1
    assert rho("xor-mask", 0.3, "mechanism") < plain
    assert rho("and-mask", 0.0, "shortcuts") > plain
    # All sixteen environments agree on next to nothing: no mean is made of that.
    assert math.isnan(rho("and-mask", 1.0, "mechanism"))


def correlation(x: torch.Tensor, y: torch.Tensor, seed: int = 0) -> Correlation:
    sums = (float(values.sum()) for values in (x, y, x * x, y * y, x * y))
    return Correlation(seed, "and-mask", 1.0, "mechanism", Moments(len(x), *sums))


@given(st.integers(3, 200), st.integers(0, 2**31), st.floats(-0.9, 0.9))
def test_the_correlation_of_moments_is_pearsons(count: int, seed: int, mixed: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, count, generator=generator, dtype=torch.double)
    y = mixed * x + noise
    assert correlation(x, y).moments.rho == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), abs=1e-9)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(0, 2**31))
def test_no_mean_is_made_of_networks_with_a_handful_of_components(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(2, count, generator=generator, dtype=torch.double) for count in counts]
    found = summarize(correlation(x, y, index) for index, (x, y) in enumerate(pairs))
    enough = [(x, y) for x, y in pairs if len(x) >= 30]
    assert (found.networks, found.of, list(found.components)) == (len(enough), len(counts), sorted(counts))
    if len(enough) < 2 or 2 * len(enough) < len(counts):
        assert math.isnan(found.mean)
    else:
        rhos = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in enough]
        assert (found.mean, found.deviation) == pytest.approx((statistics.mean(rhos), statistics.stdev(rhos)))
    if sum(counts) < 30:
        assert math.isnan(found.pooled)
    else:
        together = torch.cat(pairs, dim=1)
        assert found.pooled == pytest.approx(float(torch.corrcoef(together)[0, 1]), abs=1e-9)


def read_correlations(path: Path) -> dict[str, list[Correlation]]:
    """The correlations of each initialization."""
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    found: dict[str, list[Correlation]] = defaultdict(list)
    for initialization, seed, mask, threshold, signal, count, *sums in lines:
        moments = Moments(int(count), *map(float, sums))
        found[initialization].append(Correlation(int(seed), mask, float(threshold), signal, moments))
    return found


def test_the_documented_correlations_are_those_of_the_raw_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    found = read_correlations(root / "docs" / "results" / "correlation.csv")
    write_correlations(found, tmp_path / "again.csv")
    assert read_correlations(tmp_path / "again.csv") == found

    assert [len(found[each]) for each in ("kaiming", "default")] == [4400, 4400]

    def mean(of: Summary) -> str:
        return "too few" if math.isnan(of.mean) else f"{of.mean:.2f} ± {of.deviation:.2f}"

    def pooled(of: Summary) -> str:
        return "too few" if math.isnan(of.pooled) else f"{of.pooled:.2f}"

    page = (root / "docs" / "results.md").read_text()
    for initialization, name in (("default", "PyTorch's"), ("kaiming", "Kaiming")):

        def cells(signal: str, cell: Callable[[Summary], str], of: str = initialization) -> str:
            at = [[c for c in found[of] if c[1:4] == ("and-mask", t, signal)] for t in THRESHOLDS]
            return " | ".join(cell(summarize(each)) for each in at)

        for signal, gradient in (("mechanism", "mechanism's"), ("shortcuts", "shortcuts'")):
            assert f"| {name}: ρ with the {gradient} gradient | {cells(signal, mean)} |" in page
            assert f"| {name}: the same, pooled | {cells(signal, pooled)} |" in page
        assert f"| {name}: networks that count | {cells('mechanism', lambda of: str(of.networks))} |" in page
        left = cells("mechanism", lambda of: f"{of.components[0]} to {of.components[-1]}")
        assert f"| {name}: components left in a network | {left} |" in page


def test_zero_epochs_stand_for_the_papers_number() -> None:
    assert config().resolve().schedule.epochs == 94
    assert config(environments=1024).resolve().schedule.epochs == 3
    assert config(epochs=5).resolve().schedule.epochs == 5
    # What was asked for stays, so that a study may vary what the number follows from.
    assert config().with_options(environments=1024).resolve().schedule.epochs == 3
    with pytest.raises(InputError, match="--epochs -1: must be at least 1"):
        config(epochs=-1).check()


def test_the_held_out_part_comes_on_top_of_the_papers_1280_examples() -> None:
    environments = JOB.environments(config())
    assert len(environments["train-000"]) == round(1280 / 0.9)
    assert len(environments["ood"]) == 2000
    assert len(environments.train) == 32


def test_every_quantity_of_the_data_is_an_option() -> None:
    options = options_of(type(JOB.config)).keys()
    renamed = {"examples", "seed"}
    assert {field.name for field in dataclasses.fields(Spirals)} - renamed <= options


def test_a_study_around_few_environments_varies_what_their_rule_looks_at() -> None:
    space, few = derived(config(environments=10)), config(environments=10)
    assert "significance" in space.names()
    tried = few.with_options(significance=1e-6)  # signs of ten agree more often by chance
    tried.check()
    assert tried.resolve().rule(10) == TMask(1e-6)


@pytest.mark.parametrize(
    ("options", "rule", "averaged"),
    [
        ({"environments": 2}, "t-mask", 0.9),
        ({"environments": 17}, "t-mask", 0.9),
        ({"environments": 18}, "and-mask", 0.0),
        ({"environments": 1}, "and-mask", 0.0),
        ({"environments": 7, "aggregator": "and-mask"}, "and-mask", 0.0),
        ({"environments": 7, "aggregator": "t-mask"}, "t-mask", 0.0),
        ({"environments": 7, "objective": "vrex"}, "mean", 0.0),
        # What is given of how a mask counts signs is meant for the AND-mask.
        ({"environments": 7, "threshold": 0.8}, "and-mask", 0.0),
        ({"environments": 7, "significance": 0.1}, "t-mask", 0.9),
        ({"environments": 7, "steps_per_update": 2}, "and-mask", 0.0),
        ({"environments": 7, "environment_momentum": 0.5}, "and-mask", 0.5),
        ({"environments": 7, "environments_per_step": 2}, "and-mask", 0.0),
    ],
    ids=str,
)
def test_the_default_rule_follows_from_the_number_of_environments(
    options: dict[str, Any], rule: str, averaged: float
) -> None:
    asked = config(**options)
    asked.check()
    resolved = asked.resolve()
    assert resolved.aggregation.aggregator == rule
    assert resolved.aggregation.environment_momentum == averaged
    assert resolved.resolve() == resolved


def test_the_figures_of_the_tables_are_drawn_of_finished_runs(tmp_path: Path) -> None:
    """Fig. 6 and 14 have a column a method, Fig. 15 a line a method and a point a number of environments."""
    small = {"examples": 16, "test_examples": 20, "batch_size": 8, "epochs": 2, "hidden_units": 8, "evaluations": 2}

    def runs(**changes: Any) -> list[Run]:
        wanted = config(**{**small, **changes})
        history = train(JOB, wanted, ProcessContext(), Silent()).history
        return [Run.of(history, 0, option_values(wanted.resolve()))]

    tables = comparisons_of(load_job("synthetic"))
    methods = {name: runs(**options, environments=2) for name, options in tables["fig-6"].configurations.items()}
    box, curves = (draw(methods) for draw in tables["fig-6"].figures.values())
    assert len(box.axes[0].get_xticklabels()) == len(methods) == 8
    assert len(curves.axes) == 2 * len(methods)
    counts = {
        f"{method}, {count}": runs(aggregator=method, environments=count)
        for method in ("and-mask", "mean")
        for count in (2, 3)
    }
    (drawn,) = (draw(counts) for draw in tables["fig-15"].figures.values())
    assert [list(line.get_xdata()) for line in drawn.axes[0].lines[:2]] == [[2, 3], [2, 3]]


def test_the_figure_of_the_data_has_the_papers_four_panels() -> None:
    """Fig. 5: the spirals are in all panels, and an environment's shortcuts are two points of its own."""
    spirals = Spirals.of(config(examples=100, test_examples=50).spirals, 0.0, 0)
    parts = {name: spirals.load(name) for name in ("train-000", "train-001")}
    figure = data_figure(parts, spirals.load("ood"))
    titles = [axes.get_title() for axes in figure.axes[:4]]
    assert titles == [*parts, "pooled", "test o.o.d."]
    points = [len({tuple(p) for c in axes.collections[:2] for p in c.get_offsets().tolist()}) for axes in figure.axes]
    assert points == [100, 100, 200, 50, 2, 2, 4, 50]
    assert [len(axes.collections) - 2 for axes in figure.axes] == [1] * 7 + [0]  # boundaries of the oracles


def test_the_oracles_of_fig_5_make_no_mistake_where_they_can_decide() -> None:
    spirals = Spirals.of(config(examples=1280, test_examples=500).spirals, 0.0, 0)
    (known, targets), (others, expected) = spirals.load("train-000"), spirals.load("ood")
    assert torch.equal(oracle(known[:, :2], targets, others[:, :2]), expected)
    assert torch.equal(oracle(known[:1, 2:4], targets[:1], known[:9, 2:4]), targets[:1].expand(9))
    assert torch.equal(oracle(known[:20, 2:4], targets[:20], known[:, 2:4]), targets)
    assert not torch.equal(oracle(known[:, 2:4], targets, others[:, 2:4]), expected)


def test_jobs_of_one_seed_see_the_same_data_with_any_aggregator() -> None:
    one, other = (JOB.environments(config(aggregator=name))["train-003"] for name in ("mean", "and-mask"))
    assert torch.equal(one.inputs, other.inputs)


@pytest.mark.slow
def test_ten_seeds_of_the_full_task() -> None:
    """The README's table: 20 runs of about a minute."""
    masked = accuracies("and-mask", range(10))
    averaged = accuracies("mean", range(10))
    assert statistics.mean(masked["ood_accuracy"]) >= 0.99
    assert min(masked["ood_accuracy"]) >= 0.97
    assert statistics.mean(averaged["ood_accuracy"]) <= 0.60
    assert min(averaged["train_accuracy"]) >= 0.99
