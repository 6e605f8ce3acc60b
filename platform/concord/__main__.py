"""``python -m concord``: what the ``concord`` program does, where the package is but not its program."""

import os
import sys

# What was checked by one version of Python is not to fail in the middle under another; so before anything is imported.
submitted_by = os.environ.get("CONCORD_CLIENT_PYTHON")
here = ".".join(map(str, sys.version_info[:2]))
if submitted_by not in (None, here):
    print(
        f"concord: submitted from Python {submitted_by}, the cluster has Python {here}; use the same", file=sys.stderr
    )
    raise SystemExit(2)

from concord.cli import entry  # noqa: E402

entry()
