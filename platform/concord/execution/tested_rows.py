"""One sentence at the end of a table's run: the test environments' values, with intervals over their rows."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from concord.analysis.intervals import LEAST_ENVIRONMENTS, Estimate, Scale, next_interval, scale_of
from concord.environments import Environments
from concord.training.evaluation import outputs_and_targets
from concord.training.left_out import CLUSTER, LeftOutPredictions
from concord.training.metric_names import environment_metric
from concord.training.row_estimates import WEIGHT, row_estimates, values_agree
from concord.weighted import Weighted

_SHOWN = 4  # environments; of more the range


@torch.no_grad()
def intervals_of_test(
    environments: Environments, model: nn.Module, name: str, metrics: Mapping[str, float]
) -> str | None:
    """The measure in the test environments, in words; None without them, or where it is not known of rows.

    Args:
        environments: of a table, fitted.
        model: the trained one.
        name: of the measure, such as accuracy or mse.
        metrics: of the run's end, with which the rows must agree.
    """
    import pandas

    about, found = environments.only_names(), dict[str, Estimate]()
    for place in environments.test:
        data = environments[place]
        outputs, targets = outputs_and_targets(model.eval(), data)
        columns = LeftOutPredictions(about).columns(outputs, targets)
        if place in about.clusters:
            columns[CLUSTER] = about.clusters[place]
        if isinstance(examples := data.take(slice(None)), Weighted):
            columns[WEIGHT] = examples.weights.numpy()
        frame = pandas.DataFrame(columns).assign(method="", seed=0, environment=place, row=np.arange(len(targets)))
        reported = {place: [metrics.get(environment_metric(name, "ood", place), math.nan)]}
        found |= values_agree(row_estimates(frame, name).get("", {}), reported)
    if not found:
        return None
    scale, values = scale_of(name), [each.value for each in found.values()]
    begin = f"{name} in the test (95 % over {'clusters' if any(each.clusters for each in found.values()) else 'rows'})"
    if len(found) > _SHOWN:
        line = f"{begin}: {min(values):.3g} to {max(values):.3g} in {len(found)} environments"
    else:
        line = f"{begin}: {', '.join(_of(place, each, scale) for place, each in found.items())}"
    rows = [float(len(environments[place])) for place in found]
    known = next_interval(values, scale, rows) if len(found) >= LEAST_ENVIRONMENTS else None
    if known is None:
        return f"{line}; {'one environment says' if len(found) == 1 else 'they say'} little of the next"
    return f"{line}; expect {known[0].low:.3g} to {known[0].high:.3g} in a new environment ({known[1]} of {len(found)})"


def _of(place: str, estimate: Estimate, scale: Scale) -> str:
    """A value with its interval, in words."""
    interval = estimate.interval(scale)
    ends = "no interval" if interval is None else f"{interval.low:.3g} to {interval.high:.3g}"
    return f"{place} {estimate.value:.3g} ({ends}; {estimate.units})"
