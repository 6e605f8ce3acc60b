"""The figures of the synthetic memorization task, in the form of the AND-mask paper's Fig. 5, 7, 14 and 15."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from concord.analysis.comparison_figures import methods_figure
from concord.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, finish, new_figure, one_panel
from concord.analysis.method_names import method_name
from concord.training.comparison import Runs, at_end
from concord_jobs.synthetic.correlations import FEWEST_COMPONENTS, Correlation, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHOD_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, GREY, "black", "#56B4E9")

Points = tuple[Tensor, Tensor]
"""Inputs ``(examples, features)`` and class targets ``(examples,)``."""


def data_figure(environments: Mapping[str, Points], test: Points) -> "Figure":
    """Fig. 5: mechanism above and the first two shortcut dimensions below, by environment, pooled, and o.o.d.

    Lines are the boundaries of the oracles, each of which knows a panel's dimensions; in the test shortcuts have none.
    """
    pooled = tuple(torch.cat(parts) for parts in zip(*environments.values(), strict=True))
    columns = {**environments, "pooled": pooled, "test o.o.d.": test}
    figure = new_figure(2.1 * len(columns), 4.4, None)
    axes = figure.subplots(2, len(columns), squeeze=False)
    reach = float(test[0][:, 2:4].abs().max())
    for column, (name, (inputs, targets)) in enumerate(columns.items()):
        for row, dimensions in enumerate(((0, 1), (2, 3))):
            panel = axes[row, column]
            # An environment's shortcuts are two points; in the test each example has its own point.
            size = 4 if row == 0 or name == "test o.o.d." else 40
            for label, colour in ((0, BLUE), (1, ORANGE)):
                chosen = inputs[targets == label]
                panel.scatter(*chosen[:, list(dimensions)].T, s=size, c=colour, linewidths=0, label=f"class {label}")
            if row == 0 or name != "test o.o.d.":
                edge = torch.linspace(-1, 1, 150) * (reach if row == 1 else float(inputs[:, :2].abs().max()))
                sides = oracle(inputs[:, list(dimensions)], targets, torch.cartesian_prod(edge, edge))
                panel.contour(edge, edge, sides.view(150, 150).T, levels=[0.5], colors="black", linewidths=0.7)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_aspect("equal", adjustable="box")
            if row == 1:
                panel.set(xlim=(-reach, reach), ylim=(-reach, reach))
        axes[0, column].set_title(name, fontsize=9)
    axes[1, -1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=2)
    axes[0, 0].set_ylabel("mechanism")
    axes[1, 0].set_ylabel("shortcuts")
    return figure


def oracle(known: Tensor, targets: Tensor, places: Tensor) -> Tensor:
    """The class ``(places,)`` of the nearest known example at each place; both are ``(…, 2)``."""
    from scipy.spatial import KDTree

    return targets[torch.from_numpy(KDTree(known).query(places)[1])]


@torch.no_grad()
def decision_figure(model: nn.Module, test: Points, title: str) -> "Figure":
    """The model's decisions on the spiral's plane with all shortcuts at zero, and test examples."""
    from matplotlib.colors import ListedColormap

    inputs, targets = test
    reach = float(inputs[:, :2].abs().max()) * 1.05
    line = torch.linspace(-reach, reach, 200)
    grid = torch.zeros(len(line) ** 2, inputs.shape[1])
    grid[:, :2] = torch.cartesian_prod(line, line)
    logits = model.eval()(grid)
    probability = logits.softmax(1)[:, 1].view(len(line), len(line)).T
    figure, axes = one_panel(4.2, 4, layout=None)
    image = axes.imshow(
        probability, origin="lower", extent=(-reach, reach, -reach, reach), cmap="PuOr_r", vmin=0, vmax=1, alpha=0.75
    )
    axes.scatter(inputs[:600, 0], inputs[:600, 1], c=targets[:600], cmap=ListedColormap([BLUE, ORANGE]), s=5)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="spiral, first coordinate", ylabel="spiral, second coordinate")
    figure.colorbar(image, label="probability of class 1", shrink=0.8)
    return figure


def correlation_figure(correlations: Sequence[Correlation]) -> "Figure":
    """Fig. 7: ρ against τ, and the kept components; XOR-mask on the left, AND-mask on the right.

    Above, the mean and standard deviation over networks, if at least half of them have enough components left, and
    crosses for the pooled components of all networks. Below, the number of kept components of each network.
    """
    figure = new_figure(7.5, 5.2)
    panels = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(3, 2))
    for column, mask in enumerate(("xor-mask", "and-mask")):
        above, below = panels[:, column]
        of_mask = [each for each in correlations if each.mask == mask]
        thresholds = sorted({each.threshold for each in of_mask})
        for signal, style, colour in (("mechanism", "-", BLUE), ("shortcuts", "--", ORANGE)):
            at = {
                threshold: summarize(c for c in of_mask if (c.threshold, c.signal) == (threshold, signal))
                for threshold in thresholds
            }
            enough = [(t, each.mean, each.deviation) for t, each in at.items() if not np.isnan(each.mean)]
            if enough:
                x, mean, deviation = (np.array(values) for values in zip(*enough, strict=True))
                above.plot(x, mean, style, color=colour, marker=".", label=f"{signal}, mean of networks")
                low, high = np.maximum(mean - deviation, -1), np.minimum(mean + deviation, 1)
                above.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            pooled = [(t, each.pooled) for t, each in at.items() if not np.isnan(each.pooled)]
            if pooled:
                above.plot(*zip(*pooled, strict=True), "x", color=colour, label=f"{signal}, networks pooled")
        counts = [(c.threshold, c.moments.components) for c in of_mask if c.signal == "mechanism"]
        if any(count > 0 for _, count in counts):
            below.plot(*zip(*(each for each in counts if each[1] > 0), strict=True), ".", color=GREY, markersize=4)
        empty = [threshold for threshold, count in counts if count == 0]
        below.plot(empty, [0.5] * len(empty), "v", color=RED, markersize=4, label="none left")
        below.axhline(FEWEST_COMPONENTS, color=GREY, linewidth=0.6, linestyle=":")
        below.set(yscale="log", xlabel="agreement threshold τ")
        above.axhline(0, color=GREY, linewidth=0.6)
        above.set_title("XOR-mask: what disagrees" if mask == "xor-mask" else "AND-mask: what agrees", fontsize=10)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_xaxis()
    panels[0, 0].set_ylabel("correlation ρ of the\nmasked gradient")
    panels[1, 0].set_ylabel("components left\nin each network")
    panels[0, 1].legend(fontsize=7, frameon=False, handlelength=3.5)
    panels[1, 1].legend(fontsize=7, frameon=False)
    return figure


def curves_figure(runs: Runs) -> "Figure":
    """Fig. 14: accuracy by epoch in training (above) and test: a column for each method, a line for each run."""
    figure = new_figure(1.9 * len(runs), 3.6)
    panels = figure.subplots(2, len(runs), sharex=True, sharey=True, squeeze=False)
    for column, (method, each) in zip(panels.T, runs.items(), strict=True):
        for axes, metric, colour in zip(column, ("train_accuracy", "ood_accuracy"), (BLUE, RED), strict=True):
            for run in each:
                axes.plot(
                    [at.epoch for at in run.history],
                    [at.metrics[metric] for at in run.history],
                    color=colour,
                    linewidth=1,
                    alpha=max(0.15, 1 / len(each) ** 0.5),
                )
            axes.set_ylim(-0.02, 1.02)
            axes.spines[["top", "right"]].set_visible(False)
        column[0].set_title(method_name(method), fontsize=9)
        column[1].set_xlabel("epoch")
    panels[0, 0].set_ylabel("training")
    panels[1, 0].set_ylabel("o.o.d. test")
    return figure


def box_figure(runs: Runs) -> "Figure":
    """Fig. 6: final accuracy in training and in the test, a box for each method."""
    splits = ("train", "ood")
    values = {name: {split: at_end(each, f"{split}_accuracy") for split in splits} for name, each in runs.items()}
    return methods_figure(values, "accuracy")


def environments_of_runs(runs: Runs) -> "Figure":
    """Fig. 15; a row has one number of environments, and its name begins with its method, up to the last comma."""
    accuracies: dict[str, dict[int, list[float]]] = {}
    for row, each in runs.items():
        count = each[0].options["environments"]
        accuracies.setdefault(row.rsplit(",", 1)[0], {})[count] = at_end(each, "ood_accuracy")
    return environments_figure(accuracies)


def robustness_figure(runs: Runs) -> "Figure":
    """O.o.d. accuracy over the number of environments, a panel for each variance of the shortcuts and number of
    revolutions, a line for each method: the median of its runs, and from the least to the largest.

    A row's name begins with its method, up to the first comma.
    """
    from matplotlib.lines import Line2D

    panels: dict[tuple[float, float], dict[str, dict[int, list[float]]]] = {}
    for row, each in runs.items():
        for run in each:
            scale, revolutions, count = (
                run.options[name] for name in ("shortcut_scale", "revolutions", "environments")
            )
            panel = panels.setdefault((round(scale**2, 3), revolutions), {})
            by_count = panel.setdefault(row.split(",")[0], {})
            by_count.setdefault(count, []).append(run.metrics["ood_accuracy"])
    columns = sorted({revolutions for _, revolutions in panels})
    variances = sorted({variance for variance, _ in panels})
    figure = new_figure(1 + 3.2 * len(columns), 0.4 + 2.5 * len(variances))
    grid = figure.subplots(len(variances), len(columns), sharex=True, sharey=True, squeeze=False)
    everywhere = dict.fromkeys(method for methods in panels.values() for method in methods)
    colours = dict(zip(everywhere, _METHOD_COLOURS, strict=False))
    ticks = sorted({count for methods in panels.values() for by_count in methods.values() for count in by_count})
    for (variance, revolutions), methods in panels.items():
        axes = grid[variances.index(variance), columns.index(revolutions)]
        for method, by_count in methods.items():
            counts, colour = sorted(by_count), colours[method]
            low, middle, high = (
                [float(np.quantile(by_count[count], part)) for count in counts] for part in (0, 0.5, 1)
            )
            axes.plot(counts, middle, color=colour, marker=".")
            axes.fill_between(counts, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":")
        axes.set_title(f"variance {variance:g}, {revolutions:g} revolutions", fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(count) for count in ticks])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("training environments", fontsize=10)
    figure.supylabel("o.o.d. accuracy", fontsize=10)
    lines = [Line2D([], [], color=colour, marker=".", label=method_name(method)) for method, colour in colours.items()]
    grid[0, -1].legend(handles=lines, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def environments_figure(accuracies: Mapping[str, Mapping[int, Sequence[float]]]) -> "Figure":
    """Fig. 15: o.o.d. accuracy by number of training environments; a point for each run, a line for the best runs."""
    figure, axes = one_panel(7, 3.2)
    for (method, by_count), colour in zip(accuracies.items(), _METHOD_COLOURS, strict=False):
        counts = sorted(by_count)
        axes.plot(
            counts, [max(by_count[count]) for count in counts], color=colour, label=f"{method_name(method)}, best run"
        )
        for count in counts:
            axes.scatter([count] * len(by_count[count]), by_count[count], color=colour, s=10, alpha=0.6, linewidths=0)
    axes.set_xscale("log", base=2)
    axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":")
    axes.set(xlabel="training environments", ylabel="o.o.d. accuracy", ylim=(0.4, 1.02))
    finish(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
