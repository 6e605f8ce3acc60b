"""What a store of MLflow holds, and how it loses a run."""

import contextlib
import sqlite3
from pathlib import Path

from concord.metric_name import metric_name
from concord.tracking import Store, TrackedRun


def tracked_runs(store: Store, experiment: str, finished_only: bool = True) -> list[TrackedRun]:
    """The experiment's runs, the newest first; none if there is no such experiment."""
    kept = store.client.get_experiment_by_name(experiment)
    condition = "attributes.status = 'FINISHED'" if finished_only else ""
    order = ["attributes.start_time DESC"]
    found = store.client.search_runs([kept.experiment_id], condition, order_by=order) if kept else []
    return [store.run(entry.info.run_id) for entry in found]


def points_of(store: Store, run_id: str, key: str) -> list[tuple[int, float]]:
    """Step and value of a metric in the order of steps, with the last value of each step."""
    logged = store.client.get_metric_history(run_id, metric_name(key))
    return sorted({point.step: point.value for point in sorted(logged, key=lambda point: point.timestamp)}.items())


def lose_run(file: Path, run_id: str) -> None:
    """Remove a run from a database, as if it had never been there."""
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        for table in ("params", "tags", "metrics", "latest_metrics", "runs"):
            database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))
