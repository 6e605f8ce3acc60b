"""``python -m concord``: the ``concord`` program, where only the package is installed."""

import os
import sys

# Before any import: input that one version of Python has checked must not fail under another.
submitted_by = os.environ.get("CONCORD_CLIENT_PYTHON")
here = ".".join(map(str, sys.version_info[:2]))
if submitted_by not in (None, here):
    print(
        f"concord: submitted from Python {submitted_by}, the cluster has Python {here}; use the same", file=sys.stderr
    )
    raise SystemExit(2)

from concord.cli import entry  # noqa: E402

entry()
