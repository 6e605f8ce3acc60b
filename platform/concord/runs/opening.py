"""What is decided when a run begins, in its first lines: which data do what, what selects, where it is kept."""

from collections.abc import Mapping
from types import MappingProxyType

from concord.environments import Environments
from concord.redaction import redact
from concord.runs.folder import RunFolder
from concord.training.options import TrainConfig


def opening_lines(
    run: RunFolder,
    what: str,
    data: str,
    criterion: tuple[str, str] | None,
    required: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """The first lines of a run.

    Args:
        run: the run.
        what: is trained, and by how many.
        data: which data do what.
        criterion: the metric by which its model is compared with earlier ones, and ``max`` or ``min``; None if the
            model is not registered.
        required: the least values of metrics with which it can be the champion.
    """
    champion = "champion: none is selected, since the model is not registered"
    if criterion is not None:
        size = "largest" if criterion[1] == "max" else "smallest"
        least = "".join(f", with {name} of at least {value:.4g}" for name, value in required.items())
        champion = f"champion: the version with the {size} {criterion[0]}{least}"
    return [
        f"run {run.name}: {what}",
        f"data: {data}",
        champion,
        f"kept in {run.kept.display_path}, tracked in {redact(run.store.uri)}",
    ]


def method_line(config: TrainConfig) -> str:
    """What a run of the training loop trains by, and how many workers it has."""
    return f"{config.method}, {_count(config.parallel.workers, 'worker')}"


def purposes(environments: Environments, held_out: float) -> str:
    """How many environments train, of which a part is held out, validate and test."""
    kept = f" ({held_out:.3g} of each held out)" if held_out else ""
    data = [f"{_count(len(environments.train), 'environment')} for training{kept}"]
    data += [f"{len(environments.validation)} for validation"] if environments.validation else []
    data += [f"{len(environments.test)} for test"] if environments.test else []
    return ", ".join(data)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
