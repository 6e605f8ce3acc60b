"""Detects a run whose mask kept nothing: too few signs agree, and the model learns nothing."""

from collections.abc import Sequence

from concord.objectives import objective_type
from concord.record import Evaluation
from concord.training.options import TrainConfig


def empty_masks(history: Sequence[Evaluation], config: TrainConfig, environments: int) -> str | None:
    """A line of advice if the rule kept no component in any evaluated epoch, None otherwise.

    A converged model keeps nothing at last, either, so every evaluation counts.
    """
    if not history or any(each.metrics.get("kept_fraction") != 0 for each in history):
        return None
    data, used, tries = config.data, config.resolve(environments).aggregation, []
    if used.own_rule is None and used.significance is not None:
        tries.append(f"a larger --significance than {used.significance:g}")
    elif used.own_rule is None:
        tries.append(f"a smaller --threshold than {used.threshold:g}")
    compared = data.environments_per_step or environments
    fixed = used.environment_momentum > 0 or objective_type(config.objective.objective).every  # then refused
    if not used.per_example:
        tries.append(f"more examples of each environment at a step than --batch-size {data.batch_size}")
        if compared > 2 and not fixed:
            tries.append(f"fewer environments at a step than {compared} (--environments-per-step)")
    advice = f"; try {', or '.join(tries)}" if tries else ""
    return f"warning: kept_fraction was 0 at every evaluation: the mask keeps nothing{advice}"
