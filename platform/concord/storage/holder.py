"""Who works in a folder, as its lock or its lease tells the others: a user, a machine, and since when."""

import json
import socket
import time
from datetime import UTC, datetime


def this_holder(user: str | None) -> str:
    """This process as a holder, as JSON."""
    return json.dumps({"user": user, "host": socket.gethostname(), "since": time.time()})


def shown_holder(text: str | bytes) -> str:
    """The holder of a text by :func:`this_holder`, in words; ``somebody`` if it cannot be read."""
    try:
        told = json.loads(text)
        since = datetime.fromtimestamp(told["since"], UTC)
        return f"{told['user'] or 'somebody'} on {told['host']} since {since:%F %T} UTC"
    except (ValueError, KeyError, TypeError, OverflowError):
        return "somebody"
