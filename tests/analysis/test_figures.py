"""Figures name methods as their papers do, not by the options that choose them."""

from typing import Any

import pytest
from matplotlib.axes import Axes

from concord.analysis.comparison_figures import best_runs_figure, left_out_figure, mean_curves_figure, methods_figure
from concord.analysis.study_figures import TrialPoint, searches_figure, study_figures
from concord.space import Choice, LogUniform, OneOf, Space
from concord_jobs.colored_mnist.figures import band_figure, flips_figure
from concord_jobs.synthetic.figures import environments_figure


def legend(axes: Axes) -> list[str]:
    drawn = axes.get_legend()
    assert drawn is not None
    return [text.get_text() for text in drawn.get_texts()]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text().split("\n")[0] for label in axes.get_xticklabels()]


def test_objectives_have_their_names() -> None:
    runs = {0.1: [0.7, 0.8], 0.9: [0.6, 0.7]}
    figure = flips_figure({"irm": {"vrex": runs, "erm, grey": runs, "of-mine": runs}})
    assert figure.axes[0].get_title() == "IRMv1"
    assert legend(figure.axes[0]) == ["V-REx", "ERM, grey", "of-mine"]
    assert legend(band_figure({"meta-irm": runs, "mm-rex": runs}, "gap", "accuracy").axes[0]) == ["meta-IRM", "MM-REx"]


def test_a_study_whose_trials_have_no_value_of_an_option_has_the_other_figures() -> None:
    trials, lines = [TrialPoint(number, {"significance": None}, 0.5 + number) for number in range(2)], list[str]()
    drawn = study_figures(trials, Space({"significance": Choice(None, 1e-5)}), "accuracy", "max", lines.append)
    assert drawn.keys() == {"history"}
    assert lines[0].startswith("no figures of slices and parallel coordinates: no varied option has a value")


@pytest.mark.parametrize("other", [0.0, "auto"])
def test_branches_may_have_zero_or_words_beside_a_logarithmic_domain(other: float | str) -> None:
    space = Space({"decay": OneOf({"off": {"l2": Choice(other, 0.1)}, "on": {"l2": LogUniform(1e-4, 1.0)}})})
    points: list[dict[str, Any]] = [{"decay": "off", "l2": other}, {"decay": "on", "l2": 0.01}]
    trials = [TrialPoint(number, point, 0.5 + number) for number, point in enumerate(points)]
    assert "slices" in study_figures(trials, space, "accuracy", "max", lambda _: None)


def test_aggregators_and_optimizers_have_their_names() -> None:
    by_count = {2: [0.5], 4: [0.9]}
    figure = environments_figure({"and-mask": by_count, "mean": by_count})
    assert legend(figure.axes[0]) == ["AND-mask, best run", "average, best run"]
    assert ticks(best_runs_figure({"temporal-and-mask": [0.1], "adam": [0.2]}, "KL").axes[0]) == [
        "temporal AND-mask Adam",
        "Adam",
    ]
    curves = {"unseen levels": {"adam": [[(0.5, 0.2), (1.0, 0.1)]]}}
    assert legend(mean_curves_figure(curves, "KL").axes[0]) == ["Adam (1 runs)"]


def test_methods_and_searches_of_studies_have_their_names() -> None:
    values = {"train": [1.0, 0.9], "ood": [0.5, 0.6]}
    assert ticks(methods_figure({"plain": values, "l1": values, "batch-norm": values}, "accuracy").axes[0]) == [
        "average",
        "L1",
        "batch norm",
    ]
    figure = searches_figure({"tpe": [[0.1, 0.2]], "random": [[0.1, 0.3]]}, "accuracy", "max")
    assert legend(figure.axes[0]) == ["TPE (1 studies)", "random (1 studies)"]


def test_each_of_26_methods_left_out_has_a_mark_of_its_own() -> None:
    figure = left_out_figure({str(method): {"a": ([0.1, 0.2], [0.3, 0.4])} for method in range(26)}, "accuracy")
    marks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines() if line.get_marker() != "|"}
    assert len({mark for mark in marks if mark[1] != "None"}) == 26
