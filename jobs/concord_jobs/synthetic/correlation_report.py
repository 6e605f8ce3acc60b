"""Fig. 7 of the AND-mask paper: the signals in masked gradients of untrained networks, computed in each call."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.environments import BatchStream
from concord.models.mlp import Initialization
from concord.options import OptionGroup
from concord_jobs.synthetic.correlations import Correlation, gradient_correlations, summarize, write_correlations
from concord_jobs.synthetic.figures import correlation_figure
from concord_jobs.synthetic.network import network
from concord_jobs.synthetic.spirals import MECHANISM_DIMENSIONS, Spirals


@dataclass(frozen=True, kw_only=True)
class CorrelationReport(OptionGroup):
    """Correlate masked gradients with those of the mechanism and of the shortcuts (Fig. 7)."""

    # fmt: off
    seeds: int = 10
    """Number of networks of each initialization for the gradient correlations."""
    environments: int = 16
    """Number of environments for the gradient correlations."""
    batch_size: int = 1024
    """Number of examples of each environment for the gradient correlations."""
    shortcut_scale: float = 0.1**0.5
    """Standard deviation of the shortcuts."""
    revolutions: float = 3.0
    """Revolutions of each spiral."""
    one_logit: bool = False
    """Networks with one output, the logit of class 1, in place of two."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and, without a tracking URI, for MLflow's store."""
    # fmt: on


def report_correlations(options: CorrelationReport, info: Callable[[str], None]) -> Mapping[str, Any]:
    """Measure them for both initializations, draw them, and keep them as ``correlation.csv``."""
    options.require_at_least(1, "seeds", "environments", "batch_size")
    data = Spirals(
        examples=options.batch_size,
        environments=options.environments,
        shortcut_scale=options.shortcut_scale,
        revolutions=options.revolutions,
    ).as_environments()
    inputs, targets = BatchStream(data.load(data.train), options.batch_size, seed=0).batch(0)
    thresholds = [index / 10 for index in range(11)]
    folder = options.output / "reports" / "synthetic"
    found: dict[str, list[Correlation]] = {}
    cells: dict[str, str] = {}
    figures: dict[str, str] = {}
    for initialization in get_args(Initialization):
        made = partial(network, inputs.shape[-1], options.one_logit, initialization=initialization)
        of_networks = found[initialization] = []
        for seed in range(options.seeds):
            of_networks += gradient_correlations(made, inputs, targets, MECHANISM_DIMENSIONS, thresholds, seed)
            info(f"gradient correlations, {initialization} initialization: {seed + 1} of {options.seeds} networks")
        named = "" if initialization == "default" else f"{initialization} "
        cells |= {
            f"{named}{mask} τ={threshold:g} {signal}": _cell(of_networks, mask, threshold, signal)
            for mask, at in (("and-mask", (0.0, 0.5, 0.7, 0.8, 1.0)), ("xor-mask", (0.5, 1.0)))
            for threshold in at
            for signal in ("mechanism", "shortcuts")
        }
        figure = f"{named}correlation".replace(" ", "-")
        figures[figure] = str(save(correlation_figure(of_networks), folder / f"{figure}.png"))
    write_correlations(found, folder / "correlation.csv")
    return {"correlation": cells, "figures": figures}


def _cell(correlations: Sequence[Correlation], mask: str, threshold: float, signal: str) -> str:
    """A table's cell: ρ, and its numbers of networks and components."""
    found = summarize(c for c in correlations if (c.mask, c.threshold, c.signal) == (mask, threshold, signal))
    least, most = found.components[0], found.components[-1]
    mean = "too few" if math.isnan(found.mean) else f"{found.mean:.2f} ± {found.deviation:.2f}"
    pooled = "too few" if math.isnan(found.pooled) else f"{found.pooled:.2f}"
    return (
        f"{mean} ({found.networks} of {found.of} networks); pooled {pooled} "
        f"({sum(found.components)} components, {least} to {most} a network)"
    )
