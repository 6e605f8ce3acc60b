"""Submissions that a cluster has forgotten, as after a restart of its head node: their runs in MLflow name them."""

import itertools
from collections.abc import Collection

from concord.execution.submission.admission import Submission
from concord.submitted import SUBMISSION_TAG
from concord.tracking import Store
from concord.tracking.alive import shown_status
from concord.tracking.store import OWNER

# The newest runs that are looked at.
_MOST = 1000


def earlier_submissions(store: Store, address: str, known: Collection[str]) -> list[Submission]:
    """The submissions at a dashboard's address of which the store has a run, but for those that Ray knows.

    The status is the run's: running, interrupted, finished, failed or killed.
    """
    found: dict[str, Submission] = {}
    for run in itertools.islice(store.search(f"tags.`{SUBMISSION_TAG}` != ''"), _MOST):
        identity, dashboard = run.tags[SUBMISSION_TAG], run.tags.get("ray.dashboard", "")
        if run.group is not None or identity in {*known, *found} or not dashboard.startswith(f"{address}/"):
            continue
        group = {"concord.study": "tune", "concord.comparison": "compare"}
        found[identity] = Submission(
            id=identity,
            status=shown_status(store, run, lambda _: False).status.lower(),
            command=next((command for tag, command in group.items() if tag in run.tags), "train"),
            job=run.tags.get("concord.job", ""),
            name=run.name,
            owner=run.tags.get(OWNER, ""),
            started=run.started.timestamp(),
            ended=None,
            exit_status=None,
            message="the cluster has forgotten it; its run in MLflow says so",
            again="",
        )
    return list(found.values())
