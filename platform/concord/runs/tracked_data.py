"""The environments of a run as MLflow datasets: one each, or one for each purpose if there are many."""

import hashlib
import json
from collections.abc import Sequence

from concord.environments.summary import PURPOSES, DataSummary
from concord.tracking import TrackedData

# MLflow's page is unreadable with more.
_LISTED = 100


def tracked_data(parts: Sequence[DataSummary]) -> list[TrackedData]:
    """The MLflow datasets of these parts of the data."""
    if len(parts) <= _LISTED:
        return [_of_one(part) for part in parts]
    by_purpose = {purpose: [part for part in parts if part.purpose == purpose] for purpose in PURPOSES}
    return [_together(purpose, found) for purpose, found in by_purpose.items() if found]


def _of_one(part: DataSummary) -> TrackedData:
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
    schema = {"mlflow_tensorspec": {name: json.dumps(spec) for name, spec in tensors.items()}}
    return TrackedData(name, part.digest, part.purpose, schema, {"num_rows": part.examples})


def _together(purpose: str, parts: Sequence[DataSummary]) -> TrackedData:
    digest = hashlib.sha256("".join(f"{part.name} {part.digest}\n" for part in parts).encode()).hexdigest()[:16]
    profile = {"num_rows": sum(part.examples for part in parts), "environments": len(parts)}
    return TrackedData(f"{len(parts)} environments, {purpose}", digest, purpose, None, profile)
