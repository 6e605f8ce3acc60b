"""Names of metrics, as the tracking store accepts them."""

import re

_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


def metric_name(name: str) -> str:
    """Return `name` as MLflow accepts it: other characters become ``_`` (``accuracy@5`` is ``accuracy_5``).

    MLflow would refuse an invalid name only at the end of a training run.
    """
    parts = (part for part in _NOT_IN_A_NAME.sub("_", name).split("/") if part not in ("", ".", ".."))
    return "/".join(parts)[:250] or "_"
