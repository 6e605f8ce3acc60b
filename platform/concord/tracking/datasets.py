"""The environments of a run as MLflow datasets: one each, or one for each purpose if there are many."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from concord.environments.summary import PURPOSES, DataSummary
from concord.tracking.client import failures, import_mlflow
from concord.tracking.store import Store

_LISTED = 100  # more make MLflow's page unreadable
_LONGEST_NAME = 500


def log_data(store: Store, run_id: str, parts: Sequence[DataSummary]) -> None:
    """Log the datasets of a run; those logged before are skipped."""
    with failures(store.uri, f"keep the datasets of run {run_id}"):
        tags = store.client.get_run(run_id).data.tags
        source = json.dumps({"tags": {key: tags[key] for key in sorted(tags) if key.startswith("mlflow.source.")}})
        store.client.log_inputs(run_id, dataset_inputs(parts, source))


def dataset_inputs(parts: Sequence[DataSummary], source: str = "{}") -> list[Any]:
    """The inputs of a run in MLflow: these parts of the data, made by the code that ``source`` describes."""
    if len(parts) <= _LISTED:
        return [_single(part, source) for part in parts]
    by_purpose = {purpose: [part for part in parts if part.purpose == purpose] for purpose in PURPOSES}
    return [_combined(purpose, found, source) for purpose, found in by_purpose.items() if found]


def _single(part: DataSummary, source: str) -> Any:
    # Otherwise MLflow's lists would merge both parts of an environment.
    name = f"{part.name}, held out" if part.purpose == "held-out" else part.name
    specs = {
        leaf.name: {"type": "tensor", "tensor-spec": {"dtype": leaf.dtype, "shape": [-1, *leaf.shape]}}
        for leaf in part.leaves
    }
    if specs.keys() == {"inputs", "targets"}:
        tensors = {"features": [specs["inputs"]], "targets": [specs["targets"]]}
    else:
        tensors = {"features": [{"name": name, **spec} for name, spec in specs.items()]}
    schema = json.dumps({"mlflow_tensorspec": {name: json.dumps(spec) for name, spec in tensors.items()}})
    return _input(name, part.digest, part.purpose, schema, {"num_rows": part.examples}, source)


def _combined(purpose: str, parts: Sequence[DataSummary], source: str) -> Any:
    digest = hashlib.sha256("".join(f"{part.name} {part.digest}\n" for part in parts).encode()).hexdigest()[:16]
    profile = {"num_rows": sum(part.examples for part in parts), "environments": len(parts)}
    return _input(f"{len(parts)} environments, {purpose}", digest, purpose, None, profile, source)


def _input(name: str, digest: str, purpose: str, schema: str | None, profile: Mapping[str, int], source: str) -> Any:
    import_mlflow()
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(name[:_LONGEST_NAME], digest, "code", source, schema, json.dumps(profile))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", purpose)])
