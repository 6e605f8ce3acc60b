"""What earlier runs left in the tracking store, for reports."""

from pathlib import Path

from concord.tracking import Store
from concord.training.options import RUNTIME_OPTIONS
from concord.training.outcome import Evaluation

_CURVES = ("train_accuracy", "held_out_accuracy", "validation_accuracy", "ood_accuracy")


def finished_histories(job: str, output: Path, tracking_uri: str | None, by: str) -> dict[str, list[Evaluation]]:
    """The evaluations of the newest finished run of the job for each value of the parameter ``by``.

    Only of runs whose other parameters are those of the newest one, so that like is compared with like. A parameter
    that one of two runs does not have is not compared: it has no part in that run.
    """
    store = Store.open(output, tracking_uri)
    found: dict[str, list[Evaluation]] = {}
    ignored = {by, *RUNTIME_OPTIONS}
    common: dict[str, str] | None = None
    for run in store.runs(job):
        value = run.parameters.get(by)
        others = {name: given for name, given in run.parameters.items() if name not in ignored}
        common = others if common is None else common
        alike = all(others[name] == common[name] for name in others.keys() & common.keys())
        if value is None or value in found or not alike:
            continue
        epochs = dict(store.history(run.run_id, "epoch"))
        curves = {name: dict(store.history(run.run_id, name)) for name in _CURVES}
        steps = sorted(set(epochs) & set(curves["train_accuracy"]))
        found[value] = [
            Evaluation(int(epochs[step]), step, {name: at[step] for name, at in curves.items() if step in at})
            for step in steps
        ]
    return {value: history for value, history in found.items() if history}
