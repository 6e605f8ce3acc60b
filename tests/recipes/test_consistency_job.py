"""The authors' regression against a plain loop and its fixed points; §2 of the paper against known values."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import outcome
from hypothesis import given
from hypothesis import strategies as st

from concord.aggregation import AndMask, aggregate
from concord.errors import InputError
from concord.studies.job_tables import comparisons_of
from concord.studies.results import ResultLine
from concord.training import Evaluation, ProcessContext, Run, load_job, train
from concord.training.context import Silent
from concord_jobs.consistency.hessians import arithmetic_mean, geometric_mean, inconsistency, inconsistency_bound
from concord_jobs.consistency.random_gradients import kept_probability, masked_squared_norm
from concord_jobs.consistency.report import ConsistencyReport, Quantity, report_consistency
from concord_jobs.consistency.surfaces import connected_region, grid_inconsistency, two_minima, two_minima_gradients

RULES = ("mean", "and-mask", "geometric-mean")
ROWS = {"all": (0, 1, 2, 3), "first two": (0, 1), "last two": (2, 3)}
FIGURES = ("fig-1", "fig-2", "fig-3", "fig-4", "fig-10", "fig-11", "fig-12")
X = 3 * np.concatenate([np.eye(4), np.full((4, 1), 0.1)], 1)


def trained(rule: str, rows: tuple[int, ...], seed: int = 0, **options: Any) -> Mapping[str, float]:
    job = load_job("consistency").job
    config = job.config.with_options(aggregator=rule, rows=rows, seed=seed, evaluations=1, **options)
    config.check()
    return train(job, config, ProcessContext(), Silent()).metrics


def weights_of(metrics: Mapping[str, float]) -> np.ndarray:
    return np.array([metrics[f"weight_{place}"] for place in range(5)])


def notebook(rule: str, rows: tuple[int, ...], start: np.ndarray, steps: int = 1000) -> np.ndarray:
    """The authors' loop in a few lines."""
    theta, data = start.copy(), X[list(rows)]
    for step in range(steps):
        rate = 0.3 * 0.9995**step
        gradients = (data @ theta - 1)[:, None] * data
        agree = np.abs(np.sign(gradients).sum(0)) == len(rows)
        if rule == "geometric-mean":
            with np.errstate(divide="ignore"):
                update = np.sign(gradients[0]) * np.exp(np.log(np.abs(gradients)).mean(0)) * agree
        else:
            update = gradients.mean(0) * (agree if rule == "and-mask" else 1)
        theta = (theta - rate * update) * (1 - rate * 0.01)
    return theta


def known_end(rule: str, rows: tuple[int, ...]) -> tuple[list[float], float, float | None]:
    """The weights, the training loss and that of the rows that were left out, which the table has too."""
    known = comparisons_of(load_job("consistency"))["rows"].paper[
        f"{rule}, {'all rows' if len(rows) == 4 else 'first two' if 0 in rows else 'last two'}"
    ]
    ends: dict[tuple[str, int], tuple[list[float], float, float | None]] = {
        ("mean", 4): ([0.31915] * 4 + [0.12766], 9.1e-6, None),
        ("mean", 2): ([0.32609 if row in rows else 0 for row in range(4)] + [0.06522], 2.363e-6, 0.481),
    }
    weights, training, left_out = ends.get(
        (rule, len(rows)), ([0, 0, 0, 0, 3], 0.005, 0.005 if len(rows) == 2 else None)
    )
    assert [known[f"weight {place}"] for place in range(5)] == pytest.approx(weights, abs=5e-6)
    assert known["training loss"] == pytest.approx(training, rel=0.01)
    if left_out is not None:
        assert known["left-out loss"] == pytest.approx(left_out, rel=0.002)
    return weights, training, left_out


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("rule", RULES)
def test_the_authors_loop_ends_at_the_known_fixed_points(rule: str, rows: tuple[int, ...]) -> None:
    """And each step of a run is that of this loop, as tested below."""
    start = weights_of(trained(rule, rows, epochs=1, lr=1e-12))
    assert notebook(rule, rows, start) == pytest.approx(known_end(rule, rows)[0], abs=0.05)


# Each rule and each choice of rows. One suffices for every day, as each step is that of the loop above.
@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        pytest.param(rule, rows, id=rule, marks=[pytest.mark.slow] if number else [])
        for number, (rule, rows) in enumerate(zip(RULES, ROWS.values(), strict=True))
    ],
)
def test_a_run_ends_at_the_known_fixed_points(rule: str, rows: tuple[int, ...]) -> None:
    metrics = trained(rule, rows)
    weights, training, left_out = known_end(rule, rows)
    assert weights_of(metrics) == pytest.approx(weights, abs=0.05)
    assert metrics["train_loss"] == pytest.approx(training, abs=1e-3 if training > 1e-3 else 1e-7)
    if left_out is None:
        assert "ood_loss" not in metrics
    else:
        assert metrics["ood_loss"] == pytest.approx(left_out, abs=0.05)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 3)])
def test_each_step_is_that_of_the_authors_loop(rule: str, rows: tuple[int, ...]) -> None:
    """A step that vanishes gives the start; after 60 steps float32 has not yet chosen another side of a mask."""
    start = weights_of(trained(rule, rows, epochs=1, lr=1e-12))
    assert 0.01 < np.abs(start).mean() < 0.3
    found = weights_of(trained(rule, rows, epochs=60))
    assert found == pytest.approx(notebook(rule, rows, start, 60), abs=1e-5)
    another = weights_of(trained(rule, rows, seed=1, epochs=1, lr=1e-12))
    assert np.abs(another - start).min() > 1e-4


@pytest.mark.parametrize("vectorize", ["vmap", "one-by-one"])
def test_the_way_that_gradients_are_computed_does_not_matter(vectorize: str) -> None:
    found, other = (weights_of(trained("and-mask", (0, 1), epochs=50, vectorize=way)) for way in ("pooled", vectorize))
    assert found == pytest.approx(other, abs=1e-6)


def test_the_table_has_each_rule_on_each_choice_of_rows() -> None:
    table = comparisons_of(load_job("consistency"))["rows"]
    assert len(table.configurations) == 9
    assert table.paper.keys() == table.configurations.keys()
    assert "not in the paper" in table.title
    column = table.columns["left-out loss"]
    assert callable(column)
    seen, all_seen = (Run.of([Evaluation(1, 1, each)], 0, {}) for each in ({"ood_loss": 0.5}, {}))
    assert column(seen) == 0.5
    assert np.isnan(column(all_seen))
    kept = ResultLine("mean, all rows", 0, {"weight 0": 0.3, "left-out loss": column(all_seen)}, 1.0, {}).as_json()
    assert kept["values"] == {"weight 0": 0.3}, "NaN is no JSON"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Of ``concord report consistency``, with fewer draws; the exact numbers are the same."""
    output = tmp_path_factory.mktemp("report")
    lines: list[str] = []
    result = report_consistency(ConsistencyReport(draws=40, problems=5, output=output), lines.append)
    assert lines[-1].endswith("56 of 56 as known")
    return {**result, "folder": output / "reports" / "consistency"}


def test_every_number_of_the_report_is_as_known(report: Mapping[str, Any]) -> None:
    wrong = {f"{place}: {name}": row for place, rows in report["table"].items() for name, row in rows.items()
             if not row["agrees"]}  # fmt: skip
    assert not wrong
    assert {row["source"] for rows in report["table"].values() for row in rows.values()} == {"paper", "derived"}
    json.dumps(report["table"])


def test_the_propositions_hold_and_the_printed_ones_do_not(report: Mapping[str, Any]) -> None:
    first, second, third = (report["table"][f"Proposition {number}"] for number in (1, 2, 3))
    assert 0 < first["least ‖m ⊙ ∇L‖² over 2 L(θ⁰) / (ηk), largest"]["found"] <= 1
    assert second["norm where the printed bound is 0, n = 1, t = d = 3"]["found"] > 0.1
    assert 0.5 < third["I over the bound with 4, largest of 50 random pairs"]["found"] <= 1, "with 2 it would not hold"
    assert set(report["errata"]) == {"proposition 2", "proposition 3", "appendix A.1", "Fig. 3 and 12"}
    assert "A's loss is 0.0461 in place of 0.0032" in report["errata"]["appendix A.1"]


def test_all_figures_are_drawn_and_small(report: Mapping[str, Any]) -> None:
    assert set(report["figures"]) == set(FIGURES)
    for name, path in report["figures"].items():
        assert Path(path) == report["folder"] / f"{name}.png"
        assert 20_000 < Path(path).stat().st_size < 200_000


def test_the_document_has_the_reports_table(report: Mapping[str, Any]) -> None:
    """But for what is drawn at random, of which the document's report has more."""
    document = (Path(__file__).parents[2] / "docs" / "consistency.md").read_text(encoding="utf-8")
    exact = [
        line
        for line in (report["folder"] / "table.md").read_text(encoding="utf-8").splitlines()
        if not any(word in line for word in ("simulated", "largest", "θᵢ"))
    ]
    assert len(exact) > 30
    assert [line for line in exact if line not in document] == []


def test_what_is_found_elsewhere_is_said_to_differ() -> None:
    def agrees(relation: Any, known: Any, found: Any) -> bool:
        return Quantity("", "", known, found, 0.1, relation).agrees

    assert [agrees("=", 1, found) for found in (0.8, 0.95, 1.2)] == [False, True, False]
    assert [agrees("≤", 1, found) for found in (-5, 1.05, 1.2)] == [True, True, False]
    assert [agrees("≥", 1, found) for found in (0.8, 0.95, 7)] == [False, True, True]
    assert not agrees("=", [1, 1], [1, 2])
    assert not agrees("≤", 1, float("nan"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "consistency", "--rows", "0", "4"], "--rows 0 4: give one or more of 0 to 3, each once"),
        (["train", "consistency", "--rows", "1", "1"], "--rows 1 1: give one or more of 0 to 3, each once"),
        (["train", "consistency", "--rows", "-1"], "--rows -1: give one or more of 0 to 3, each once"),
        (["train", "consistency", "--rows", "first"], "--rows first"),
        (["train", "consistency", "--decay-per-step", "0"], "--decay-per-step 0.0: must lie in (0, 1]"),
        (["report", "consistency", "--draws", "1"], "--draws 1: must be at least 2"),
        (["report", "consistency", "--problems", "0"], "--problems 0: must be at least 1"),
        (["report", "consistency", "--seed", "-1"], "--seed -1: must be at least 0"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs"
    status, result = outcome(capsys, *words, "--output", str(output))
    assert status == 2
    assert said in result["error"]
    assert "\n" not in result["error"]
    assert not output.exists()


def test_no_rows_at_all_are_refused_too() -> None:
    config = load_job("consistency").job.config.with_options(rows=())
    with pytest.raises(InputError, match="--rows : give one or more of 0 to 3"):
        config.check()


# --- quadratic losses, grids and random gradients of §2

SEEDS, SIZES = st.integers(0, 10_000), st.integers(1, 6)


def spd(seed: int, size: int, condition: float = 10.0) -> np.ndarray[Any, Any]:
    """A random symmetric positive definite matrix."""
    draw = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(draw.standard_normal((size, size)))
    found: np.ndarray[Any, Any] = (basis * np.exp(draw.uniform(0, np.log(condition), size))) @ basis.T
    return found


@given(SEEDS, SIZES, st.sampled_from([2.0, 1e2, 1e4]))
def test_the_geometric_mean_solves_its_equation_between_the_others(seed: int, size: int, condition: float) -> None:
    a, b = spd(seed, size, condition), spd(seed + 1, size, condition)
    mean, arithmetic = geometric_mean([a, b]), arithmetic_mean([a, b])
    assert mean @ np.linalg.solve(a, mean) == pytest.approx(b, rel=1e-6, abs=1e-8 * condition)
    harmonic = np.linalg.inv(arithmetic_mean([np.linalg.inv(a), np.linalg.inv(b)]))
    for lower, upper in itertools.pairwise([harmonic, mean, arithmetic]):
        assert np.linalg.eigvalsh(upper - lower)[0] > -1e-8 * np.abs(arithmetic).max()


@given(SEEDS, SIZES)
def test_the_geometric_mean_follows_a_change_of_coordinates(seed: int, size: int) -> None:
    pair = [spd(seed + place, size) for place in range(2)]
    change = np.random.default_rng(seed).standard_normal((size, size)) + 3 * np.eye(size)
    moved = geometric_mean([change @ each @ change.T for each in pair])
    assert moved == pytest.approx(change @ geometric_mean(pair) @ change.T, rel=1e-6, abs=1e-6)
    assert geometric_mean(pair[::-1]) == pytest.approx(geometric_mean(pair), rel=1e-7, abs=1e-9)


@given(SEEDS, SIZES, st.sampled_from([1.0, 1e2, 1e6]))
def test_the_bound_with_4_holds_for_matrices_that_share_no_axes(seed: int, size: int, condition: float) -> None:
    pair = spd(seed, size, condition), spd(seed + 1, size, condition)
    assert 0.3 <= inconsistency(pair, 0.3) <= inconsistency_bound(pair, 0.3) * (1 + 1e-6)


@given(SEEDS, SIZES, st.floats(1e-3, 1e3))
def test_inconsistency_knows_no_order_and_no_scale(seed: int, size: int, scale: float) -> None:
    matrices = [spd(seed + place, size) for place in range(3)]
    found = inconsistency(matrices, 0.1)
    assert inconsistency(matrices[::-1], 0.1) == pytest.approx(found)
    axes = np.diag(np.random.default_rng(seed).uniform(0.1, 10, size)) * scale
    assert inconsistency([axes @ each @ axes for each in matrices], 0.1) == pytest.approx(found, rel=1e-5)
    assert inconsistency(matrices, 0.2) == pytest.approx(2 * found)
    assert inconsistency([matrices[0]] * 2, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(4))
def test_on_a_grid_quadratic_losses_have_their_exact_inconsistency(seed: int) -> None:
    axis = np.linspace(-1, 1, 801)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    matrices = [spd(2 * seed + place, 2) for place in range(2)]
    losses = [0.5 * np.einsum("...i,ij,...j->...", points, each, points) for each in matrices]
    exact = inconsistency(matrices, 0.05)
    assert exact * 0.97 < grid_inconsistency(losses, (400, 400), 0.05) <= exact * (1 + 1e-9)


def test_a_region_as_good_behind_a_wall_does_not_count() -> None:
    wall = np.array([[0.0, 0.0, 5.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert connected_region(wall, (0, 0), 0.1).tolist() == [[True, True, False, False]] * 2
    other = np.array([[0.0, 0.0, 0.0, 9.0], [0.0, 0.2, 0.0, 0.0]])
    assert grid_inconsistency([wall, other], (0, 0), 0.3) == pytest.approx(5.0)  # other's region holds the wall
    assert grid_inconsistency([wall, wall], (0, 0), 0.3) == 0.0


def test_the_gradients_of_fig_1_are_those_of_its_losses() -> None:
    step = 1e-6
    for place in np.random.default_rng(0).uniform(-1.5, 1.5, (50, 2)):
        slopes = [
            (np.array(two_minima(*(place + move))) - np.array(two_minima(*(place - move)))) / (2 * step)
            for move in step * np.eye(2)
        ]
        assert np.array(two_minima_gradients(place)) == pytest.approx(np.array(slopes).T, abs=1e-6)


@pytest.mark.parametrize(("environments", "signs"), [(3, 2), (5, 5), (10, 8), (7, 4)])
def test_the_rule_keeps_what_eq_4_and_proposition_2_say(environments: int, signs: int) -> None:
    gradients = torch.randn(environments, 400_000, generator=torch.Generator().manual_seed(environments))
    update = aggregate(AndMask((2 * signs - environments) / environments), gradients)
    kept = kept_probability(environments, signs)
    assert update.kept.double().mean().item() == pytest.approx(kept, abs=5 * math.sqrt(kept / 400_000))
    norm = update.value.double().square().sum().item()
    assert norm == pytest.approx(masked_squared_norm(400_000, environments, signs), rel=0.03)
