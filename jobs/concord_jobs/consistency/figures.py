"""The figures of the AND-mask paper's §2 and appendix A: Fig. 1 to 4 and 10 to 12.

The paper defines Fig. 3, 4, 10 and 12. Fig. 1, 2 and 11 show surfaces without a formula; the surfaces here are our own
(``surfaces.py``), as their titles state.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from concord.analysis.figures import BLUE, GREY, ORANGE, RED, finish, new_figure, one_panel
from concord_jobs.consistency import surfaces
from concord_jobs.consistency.hessians import arithmetic_mean, geometric_mean, inconsistency
from concord_jobs.consistency.random_gradients import Simulated, masked_squared_norm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STARTS = ((0.5, 0.5), (-1.0, -1.2))
"""The starting points of gradient descent in Fig. 1."""
_REACH = 1.5
_OURS = "surfaces: ours, the paper gives no formula"


def landscapes_figure() -> "Figure":
    """Fig. 1: the loss surfaces of the average, A and B, with gradient descent from the same two places."""
    x, y, (a, b) = _surfaces()
    panels = {"average": "average loss surface", "A": "loss surface for data A", "B": "loss surface for data B"}
    figure = new_figure(9.2, 3.5)
    grid = figure.subplots(1, 3, sharey=True)
    for axes, (name, title), surface in zip(grid, panels.items(), (np.mean([a, b], axis=0), a, b), strict=True):
        drawn = axes.contourf(x, y, surface, levels=np.linspace(0, 3, 25), cmap="viridis", extend="max")
        for start in STARTS:
            path = surfaces.descent_path(name, start, learning_rate=0.02, steps=400)
            axes.plot(*path.T, color="white", linewidth=1.6)
            axes.plot(*start, "o", color="white", markersize=7, markeredgecolor="black")
            axes.plot(*path[-1], "X", color=ORANGE, markersize=8, markeredgecolor="black")
        axes.set_title(title, fontsize=10)
        _square(axes)
        axes.label_outer()
    figure.colorbar(drawn, ax=figure.axes, label="loss", ticks=range(4), shrink=0.85)
    figure.suptitle(f"Fig. 1: descent from the circles ends at the crosses ({_OURS})", fontsize=10)
    return figure


def directions_figure() -> "Figure":
    """Fig. 2: the gradient steps of A and B, on the average's surface; at (½, ½) they are at right angles."""
    x, y, losses = _surfaces()
    figure, axes = one_panel(5.4, 4.4)
    axes.contourf(x, y, np.mean(losses, axis=0), levels=np.linspace(0, 4, 17), cmap="Greys", alpha=0.6, extend="max")
    marks = np.linspace(-1.3, 1.3, 9)
    places = np.stack(np.meshgrid(marks, marks), -1).reshape(-1, 2)
    places = np.concatenate([places[np.abs(places - STARTS[0]).max(1) > 0.2], [STARTS[0]]])
    for gradient, colour, label, width in zip(
        surfaces.two_minima_gradients(places), (BLUE, ORANGE), ("A", "B"), (0.008, 0.004), strict=True
    ):
        length = np.linalg.norm(gradient, axis=-1, keepdims=True)
        steps = -0.17 * gradient / np.where(length > 0, length, 1)
        axes.quiver(
            *places.T, *steps.T, color=colour, label=f"step of {label}", width=width, angles="xy", scale_units="xy",
            scale=1, headwidth=4,
        )  # fmt: skip
    axes.plot(*STARTS[0], "o", color="white", markersize=7, markeredgecolor="black", zorder=3)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_title(f"Fig. 2: inconsistency in gradient directions\n({_OURS})", fontsize=10)
    _square(axes)
    return figure


def ellipses_figure(narrow: float, name: str) -> "Figure":
    """Fig. 3 (0.05) and 12 (0.01): the ellipses θᵀ H⁻¹ θ = 1 of A, B, and of their arithmetic and geometric means."""
    pair = surfaces.crossed_ellipses(narrow)
    arithmetic, geometric = arithmetic_mean(pair), geometric_mean(pair)
    means = {"arithmetic mean (logical OR)": arithmetic, "geometric mean (logical AND)": geometric}
    figure = new_figure(6.6, 3.7)
    for axes, (title, mean) in zip(figure.subplots(1, 2, sharey=True), means.items(), strict=True):
        for hessian, colour, label in ((pair[0], BLUE, "A"), (pair[1], ORANGE, "B")):
            axes.fill(*_ellipse(hessian), color=colour, alpha=0.35, label=label)
        axes.plot(*_ellipse(mean), color="black", linewidth=2, label="their mean")
        axes.set_title(title, fontsize=9)
        area = np.pi * np.linalg.det(mean) ** 0.5
        axes.text(-1.05, -1.05, f"its area {area:.3g}", fontsize=8)
        axes.set_aspect("equal")
        axes.set(xlabel="θ₁", ylabel="θ₂", xlim=(-1.12, 1.12), ylim=(-1.12, 1.12))
    figure.axes[1].legend(fontsize=8, loc="upper right")
    ratio = np.linalg.det(arithmetic) / np.linalg.det(geometric)
    times = inconsistency(pair)
    figure.suptitle(
        f"{name}: diag({narrow:g}, 1) and diag(1, {narrow:g}); determinants 1 : {ratio:.3g}, "
        f"areas 1 : {ratio**0.5:.3g}, I = {times:.3g} ε",
        fontsize=10,
    )
    return figure


def norms_figure(simulated: Mapping[int, Sequence[Simulated]], components: int, agreement: float) -> "Figure":
    """Fig. 4: squared norms of the average and of the masked gradient of random data, by the number of environments."""
    counts = sorted(simulated)
    figure, axes = one_panel(4.8, 3.6)
    line = [count for count in range(5, counts[-1] + 1) if (agreement * count).is_integer()]
    masked = [masked_squared_norm(components, count, round(agreement * count)) for count in line]
    axes.plot(line, [components / count for count in line], color=ORANGE, label="average, n / d")
    axes.plot(line, masked, color=BLUE, label="masked, exact")
    for which, colour in ((0, ORANGE), (1, BLUE)):
        seen = [(count, simulated[count][which]) for count in counts if simulated[count][which].mean > 0]
        axes.errorbar(
            [count for count, _ in seen], [each.mean for _, each in seen],
            yerr=[2 * each.standard_error for _, each in seen], fmt="o", color=colour, markersize=5, capsize=2,
        )  # fmt: skip
    axes.plot([], [], "o", color=GREY, label="simulated, ± 2 standard errors")
    bottom = masked[-1] / 3
    none = [count for count in counts if simulated[count][1].mean == 0]
    axes.plot(none, [bottom] * len(none), "v", color=BLUE, clip_on=False, label="simulated: no component kept")
    axes.set(
        yscale="log", ylim=(bottom, None), xlabel="number of environments d", ylabel="squared norm of the gradient"
    )
    axes.set_title(f"Fig. 4: random gradients, n = {components}, t = {agreement:g} d", fontsize=10)
    finish(axes)
    return figure


def patchwork_figure() -> "Figure":
    """Fig. 10: the network of eq. 3 at θ*, and with another θ₆, which changes only B's loss."""
    x = np.linspace(0, 1, 1001)
    figure = new_figure(7.2, 3.1)
    for axes, weight in zip(figure.subplots(1, 2, sharey=True), (1.0, -0.5), strict=True):
        parameters = (*surfaces.PATCHWORK_SOLUTION[:5], weight)
        axes.axvspan(0, 0.5, color=BLUE, alpha=0.1, linewidth=0)
        axes.axvspan(0.5, 1, color=ORANGE, alpha=0.1, linewidth=0)
        axes.plot(x, surfaces.patchwork_target(x), color=GREY, linewidth=4, alpha=0.6, label="f*")
        axes.plot(x, surfaces.patchwork(parameters, x), color=RED, linewidth=1.6, label="f of the network")
        a, b = surfaces.patchwork_losses(parameters)
        axes.text(0.25, 2.25, f"A: loss {a:.4f}", color=BLUE, ha="center", fontsize=9)
        axes.text(0.75, 2.25, f"B: loss {b:.4f}", color="#8a5f00", ha="center", fontsize=9)
        axes.set_title(f"θ = ({', '.join(f'{each:g}' for each in parameters)})", fontsize=9)
        axes.set(xlabel="x", xlim=(0, 1), ylim=(-0.2, 2.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[1].legend(fontsize=8, frameon=False, loc="center left")
    figure.suptitle("Fig. 10: what A cannot tell, B needs", fontsize=10)
    return figure


def curvatures_figure() -> "Figure":
    """Fig. 11: pairs with the same arithmetic mean; the gradients of their geometric means get weaker."""
    axis = np.linspace(-1, 1, 101)
    points = np.stack(np.meshgrid(axis, axis), -1)
    at, spreads = np.array([0.6, 0.6]), (0.0, 0.6, 0.95)
    figure = new_figure(8.6, 6.9)
    grid = figure.subplots(len(spreads), 4, sharex=True, sharey=True)
    for row, spread in zip(grid, spreads, strict=True):
        pair = surfaces.diverging_curvatures(spread)
        hessians = {
            "A": pair[0],
            "B": pair[1],
            "arithmetic mean": arithmetic_mean(pair),
            "geometric mean": geometric_mean(pair),
        }
        for axes, (name, hessian) in zip(row, hessians.items(), strict=True):
            surface = 0.5 * np.einsum("...i,ij,...j->...", points, hessian, points)
            drawn = axes.contourf(axis, axis, surface, levels=np.linspace(0, 1, 11), cmap="viridis", extend="max")
            step = -hessian @ at
            axes.quiver(*at, *step, color="black", angles="xy", scale_units="xy", scale=1, width=0.018)
            axes.set_aspect("equal")
            axes.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1))
            norm = f"\n‖∇L‖ = {np.linalg.norm(step):.3g}" if "mean" in name else ""
            axes.set_title(name + norm, fontsize=9)
        row[0].set_ylabel(f"s = {spread:g}", fontsize=10)
    figure.colorbar(drawn, ax=grid, label="loss", shrink=0.6)
    figure.suptitle(f"Fig. 11: diag(1 ± s, 1 ∓ s) and their means, with -∇L ({_OURS})", fontsize=10)
    return figure


def _surfaces() -> tuple[surfaces.Array, surfaces.Array, Any]:
    axis = np.linspace(-_REACH, _REACH, 301)
    x, y = np.meshgrid(axis, axis)
    return x, y, surfaces.two_minima(x, y)


def _ellipse(hessian: surfaces.Array) -> tuple[surfaces.Array, surfaces.Array]:
    angles = np.linspace(0, 2 * np.pi, 400)
    x, y = np.linalg.cholesky(hessian) @ np.stack([np.cos(angles), np.sin(angles)])
    return x, y


def _square(axes: "Axes") -> None:
    axes.set(xlim=(-_REACH, _REACH), ylim=(-_REACH, _REACH), xlabel="θ₁", ylabel="θ₂", xticks=(-1, 0, 1))
    axes.set_yticks((-1, 0, 1))
    axes.set_aspect("equal")
