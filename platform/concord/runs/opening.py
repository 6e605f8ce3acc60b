"""What is decided when a run begins, in its first lines: which data do what, what selects, where it is kept."""

from collections.abc import Mapping

from concord.environments import Environments
from concord.redaction import redact
from concord.runs.folder import RunFolder
from concord.training.options import TrainConfig


def opening_lines(
    run: RunFolder,
    config: TrainConfig,
    environments: Environments,
    criterion: tuple[str, str] | None,
    required: Mapping[str, float],
) -> list[str]:
    """The first lines of a run.

    Args:
        run: the run.
        config: its options.
        environments: its data.
        criterion: the metric by which its model is compared with earlier ones, and ``max`` or ``min``; None if the
            model is not registered.
        required: the least values of metrics with which it can be the champion.
    """
    held_out = f" ({config.data.held_out:.3g} of each held out)" if config.data.held_out else ""
    data = [f"{_count(len(environments.train), 'environment')} for training{held_out}"]
    data += [f"{len(environments.validation)} for validation"] if environments.validation else []
    data += [f"{len(environments.test)} for test"] if environments.test else []
    champion = "champion: none is selected, since the model is not registered"
    if criterion is not None:
        size = "largest" if criterion[1] == "max" else "smallest"
        least = "".join(f", with {name} of at least {value:.4g}" for name, value in required.items())
        champion = f"champion: the version with the {size} {criterion[0]}{least}"
    return [
        f"run {run.name}: {config.method}, {_count(config.parallel.workers, 'worker')}",
        f"data: {', '.join(data)}",
        champion,
        f"kept in {run.kept.display_path}, tracked in {redact(run.store.uri)}",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
