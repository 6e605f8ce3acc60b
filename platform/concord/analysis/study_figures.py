"""Figures of hyperparameter studies: history, options, importances, and searches side by side."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from concord.analysis.figures import BLUE, GREEN, ORANGE, PURPLE, RED, new_figure, one_panel
from concord.analysis.method_names import method_name
from concord.analysis.parameter_importance import missing_for_importance, parameter_importance
from concord.space import Choice, Domain, LogUniform, Space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


@dataclass(frozen=True)
class TrialPoint:
    """A finished trial: its number, its point, and the study's metric."""

    number: int
    point: Mapping[str, Any]
    value: float


@dataclass(frozen=True)
class Axis:
    """A varied option; ``categories`` has its values in order, None for a number."""

    name: str
    logarithmic: bool
    categories: tuple[Any, ...] | None

    def place(self, value: Any) -> float:
        """The position of a value on the axis, before scaling."""
        if self.categories is not None:
            return float(self.categories.index(value))
        return math.log10(value) if self.logarithmic else float(value)


def study_figures(
    trials: Sequence[TrialPoint], space: Space, metric: str, mode: Literal["max", "min"], info: Callable[[str], None]
) -> "dict[str, Figure]":
    """The figures of a study, by name; ``info`` receives the reason for a missing figure."""
    axes = _axes(space, trials)
    drawn = {"history": history_figure(trials, metric, mode)}
    if not axes:
        info("no figures of slices and parallel coordinates: no varied option has a value in the finished trials")
    elif len(trials) > 1:
        drawn["slices"] = slices_figure(trials, axes, metric)
        drawn["parallel"] = parallel_figure(trials, axes, metric, mode)
    else:
        info(f"no figures of slices and parallel coordinates: they need 2 finished trials, and there are {len(trials)}")
    points, scores = [trial.point for trial in trials], [trial.value for trial in trials]
    if (missing := missing_for_importance(points, scores)) is not None:
        info(f"no figure of importances: {missing}")
    else:
        drawn["importance"] = importance_figure(parameter_importance(points, scores), metric)
    return drawn


def _axes(space: Space, trials: Sequence[TrialPoint]) -> list[Axis]:
    """An axis for each varied option that some trial has."""
    domains: dict[str, list[Domain]] = {}
    for located in space.varied():
        domains.setdefault(located.name, []).append(located.domain)
    axes = []
    for name, found in domains.items():
        choices = [domain for domain in found if isinstance(domain, Choice)]
        values = [trial.point[name] for trial in trials if trial.point.get(name) is not None]
        if not values:
            continue
        if len(choices) == len(found) or any(isinstance(value, str | bool) for value in values):
            in_order = (value for choice in choices for value in choice.values)
            kinds: list[Any] = list(dict.fromkeys([*in_order, *values]))
            with contextlib.suppress(TypeError):
                kinds = sorted(kinds)
            axes.append(Axis(name, False, tuple(kinds)))
        else:  # a branch may have 0 beside another's logarithmic domain
            logarithmic = any(isinstance(domain, LogUniform) for domain in found) and min(values) > 0
            axes.append(Axis(name, logarithmic, None))
    return axes


def history_figure(trials: Sequence[TrialPoint], metric: str, mode: Literal["max", "min"]) -> "Figure":
    """Every trial in the order of its end, and the best value so far."""
    figure, axes = one_panel(6, 3.2)
    values = np.array([trial.value for trial in trials])
    order = np.arange(1, len(values) + 1)
    axes.scatter(order, values, s=10, alpha=0.5, color=BLUE, label="trial", linewidths=0)
    axes.step(order, _best_so_far(values, mode), where="post", color=RED, label="best so far")
    axes.set(xlabel="finished trials", ylabel=_words(metric))
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, markerscale=2)  # off the points
    return figure


def importance_figure(importance: Mapping[str, float], metric: str) -> "Figure":
    """The importance of each option for the score."""
    figure, axes = one_panel(6, 0.6 + 0.3 * max(len(importance), 2))
    names = list(importance)[::-1]
    axes.barh(names, [importance[name] for name in names], color=BLUE)
    axes.set(xlabel=f"fall of R² for {_words(metric)} when the option is shuffled")
    return figure


def slices_figure(trials: Sequence[TrialPoint], axes: Sequence[Axis], metric: str) -> "Figure":
    """The metric against each option alone."""
    columns = min(4, len(axes))
    rows = -(-len(axes) // columns)
    figure = new_figure(2.6 * columns, 2.3 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    jitter = np.random.default_rng(0)
    for place, axis in zip(grid.flat, axes, strict=False):
        chosen = [trial for trial in trials if trial.point.get(axis.name) is not None]
        where = [axis.place(trial.point[axis.name]) for trial in chosen]
        if axis.categories is not None:
            where = [x + jitter.uniform(-0.2, 0.2) for x in where]
            long = sum(len(str(value)) for value in axis.categories) > 20
            place.set_xticks(
                range(len(axis.categories)),
                [str(value) for value in axis.categories],
                **({"rotation": 20, "ha": "right"} if long else {}),
            )
        elif axis.logarithmic:
            where = [10**x for x in where]
            place.set_xscale("log")
            if len(where) > 0 and max(where) < 10 * min(where):  # labels of single digits would overlap
                ends = sorted({min(where), max(where)})
                place.set_xticks(ends, [f"{end:.2g}" for end in ends])
                place.minorticks_off()
        order = [trial.number for trial in chosen]
        drawn = place.scatter(where, [trial.value for trial in chosen], s=8, c=order, cmap="viridis", linewidths=0)
        place.set_xlabel(axis.name.replace("_", " "))
    for place in grid.flat[len(axes) :]:
        place.set_visible(False)
    for row in grid:
        row[0].set_ylabel(_words(metric))
    figure.colorbar(drawn, ax=grid, label="trial", shrink=0.8)
    return figure


def parallel_figure(
    trials: Sequence[TrialPoint], axes: Sequence[Axis], metric: str, mode: Literal["max", "min"]
) -> "Figure":
    """Every trial as a line through its options, darker for better trials; absent options are at the bottom."""
    from matplotlib import colormaps

    figure, plot = one_panel(1.25 * (len(axes) + 1) + 1, 3.6)
    values = np.array([trial.value for trial in trials])
    sign = 1 if mode == "max" else -1
    ranks = np.argsort(np.argsort(sign * values)) / max(len(values) - 1, 1)
    columns = [_scaled(axis, trials) for axis in axes]
    spread = np.ptp(values) or 1.0
    columns.append((values - values.min()) / spread)
    colours = colormaps["viridis_r"](0.05 + 0.95 * ranks)
    jitter = np.random.default_rng(0).uniform(-0.015, 0.015, (len(trials), len(columns)))
    for index in np.argsort(ranks):
        heights = [column[index] for column in columns]
        best = ranks[index] > 0.9
        # With many trials the lines are fainter, so that the best remain visible.
        alpha = 0.9 if best else max(0.05, min(0.6, 40 / len(trials)))
        plot.plot(heights + jitter[index], color=colours[index], linewidth=1.2 if best else 0.6, alpha=alpha)
    names = [axis.name.replace("_", " ") for axis in axes] + [_words(metric)]
    plot.set_xticks(range(len(names)), names, rotation=20, ha="right")
    plot.set_yticks([])
    plot.set_ylim(-0.18, 1.12)
    for place, axis in enumerate(axes):
        _label_ends(plot, place, axis, trials)
    for height, value in ((1.04, values.max()), (-0.07, values.min())):
        plot.text(len(axes), height, f"{value:.3g}", ha="center", fontsize=7)
    for place in range(len(names)):
        plot.axvline(place, color="0.8", linewidth=0.8, zorder=0)
    plot.spines[:].set_visible(False)
    return figure


def searches_figure(
    studies: Mapping[str, Sequence[Sequence[float]]], metric: str, mode: Literal["max", "min"]
) -> "Figure":
    """The best value so far over several studies of each search: median and quartiles.

    By search, each study has its trials' values in the order of their ends.
    """
    figure, axes = one_panel(6, 3.4)
    for index, (search, values) in enumerate(studies.items()):
        length = min(map(len, values))
        curves = np.stack([_best_so_far(np.asarray(each[:length]), mode) for each in values])
        order = np.arange(1, length + 1)
        label = f"{method_name(search)} ({len(values)} studies)"
        axes.plot(order, np.median(curves, 0), color=_COLOURS[index], label=label)
        axes.fill_between(order, *np.quantile(curves, [0.25, 0.75], axis=0), color=_COLOURS[index], alpha=0.2, lw=0)
    axes.set(xlabel="finished trials", ylabel=f"best {_words(metric)} so far")
    axes.legend(frameon=False, loc="lower right" if mode == "max" else "upper right")
    return figure


def _best_so_far(values: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    best: np.ndarray[Any, Any] = np.maximum.accumulate(values) if mode == "max" else np.minimum.accumulate(values)
    return best


def _scaled(axis: Axis, trials: Sequence[TrialPoint]) -> np.ndarray[Any, Any]:
    places = [None if trial.point.get(axis.name) is None else axis.place(trial.point[axis.name]) for trial in trials]
    present = [place for place in places if place is not None]
    low, high = (0.0, float(len(axis.categories) - 1)) if axis.categories else (min(present), max(present))
    spread = (high - low) or 1.0
    return np.array([-0.12 if place is None else (place - low) / spread for place in places])


def _label_ends(plot: Any, place: int, axis: Axis, trials: Sequence[TrialPoint]) -> None:
    if axis.categories is not None:
        for index, value in enumerate(axis.categories):
            height = index / max(len(axis.categories) - 1, 1)
            plot.text(place, height, str(value), fontsize=7, ha="center", va="center", bbox=_BEHIND, zorder=5)
        return
    present = [trial.point[axis.name] for trial in trials if trial.point.get(axis.name) is not None]
    for height, value in ((1.04, max(present)), (-0.07, min(present))):
        plot.text(place, height, f"{value:.2g}", ha="center", fontsize=7)


def _words(metric: str) -> str:
    split_names = {"ood_": "o.o.d. ", "held_out_": "held-out ", "left_out_": "left-out "}
    for prefix, words in split_names.items():
        metric = metric.replace(prefix, words)
    return metric.replace("_", " ")
