"""The first lines of a run: its method, the purposes of its data, its mask, the champion's criterion, its folder."""

from collections.abc import Collection

from concord.aggregation import SandMask, SignMask, TMask
from concord.environments import Environments
from concord.options import option_values, options_of
from concord.redaction import redact
from concord.runs.champion import required
from concord.runs.execute import needs_ray_train
from concord.runs.lifecycle import Open
from concord.runs.preflight import Checked
from concord.training.advice import mask_lines
from concord.training.job import JobFile, command_line
from concord.training.options import RunConfig, TrainConfig


def run_summary(job: JobFile, config: RunConfig, opened: Open, checked: Checked, given: Collection[str]) -> list[str]:
    """The first lines of a run; ``given`` has the names of the options that the user gave."""
    champion = "champion: none is selected, since the model is not registered"
    if config.run.register and checked.example is not None:
        metric, mode = checked.criterion
        size = "largest" if mode == "max" else "smallest"
        least = "".join(f", with {name} of at least {value:.4g}" for name, value in required(job.job, config).items())
        champion = f"champion: the version with the {size} {metric}{least}"
    return [
        *_method_and_data(job, config, opened.run.name, checked, given),
        champion,
        f"kept in {opened.run.folder.display_path}, tracked in {redact(opened.store.uri)}",
    ]


def _method_and_data(job: JobFile, config: RunConfig, name: str, checked: Checked, given: Collection[str]) -> list[str]:
    if not isinstance(config, TrainConfig):
        opening = job.job.loop.opening if job.job.loop is not None else None
        method, *data = opening(config) if opening is not None else [config.method or job.name]
        return [f"run {name}: {method}", *data]
    method, environments = config.method, checked.environments
    if checked.objective is not None:
        method = checked.objective if method == "mean" else f"{checked.objective}-{method}"
    on_ray = " on Ray Train" if needs_ray_train(config) else ""
    return [
        f"run {name}: {method}, {_count(config.parallel.workers, 'worker')}{on_ray}",
        f"data: {_purposes(environments, config.data.held_out)}",
        *mask_lines(config, len(environments.train), methods_command(job, config, given)),
    ]


def _purposes(environments: Environments, held_out: float) -> str:
    """The numbers of environments for training (a part held out), validation and test."""
    part = f" ({held_out:.3g} of each held out)" if held_out else ""
    data = [f"{_count(len(environments.train), 'environment')} for training{part}"]
    data += [f"{len(environments.validation)} for validation"] if environments.validation else []
    data += [f"{len(environments.test)} for test"] if environments.test else []
    return ", ".join(data)


def methods_command(job: JobFile, config: TrainConfig, given: Collection[str] = ()) -> str:
    """The command that compares methods on the data of a run: with the given options that say which data they are."""
    common = options_of(TrainConfig).keys() - {"data_dir"}
    values = {name: value for name, value in option_values(config).items() if name in {*given} - common}
    return command_line("compare", job.reference, "methods", options=values)


def mask_parameters(config: TrainConfig, environments: int) -> dict[str, float]:
    """The derived parameters of a run for MLflow, from its options and its number of training environments.

    ``chance_fraction`` is the fraction of components that the mask keeps if signs are independent and fair; without
    ``--threshold`` the result has the derived ``threshold`` as well.
    """
    given, rule, derived = config.aggregation, config.rule(environments), dict[str, float]()
    if given.own_rule is None and isinstance(rule, SignMask | TMask):
        derived["chance_fraction"] = rule.chance(config.num_gradients(environments))
    derives = given.threshold is None or given.significance is not None
    if given.own_rule is None and derives and isinstance(rule, SignMask | SandMask):
        derived["threshold"] = rule.threshold
    if given.own_rule is None and isinstance(rule, TMask):
        derived["significance"] = rule.significance
    return derived


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
