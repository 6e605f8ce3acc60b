"""The only access to MLflow: imported late (it takes seconds), kept quiet, and never showing a password.

The rest of the package gets its client here, so MLflow's output, logs and telemetry are controlled in one place:
standard output is for the command line's JSON, and no text from this package holds a URI's credentials.
"""

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from concord.errors import RunFailedError, UnansweredError
from concord.redaction import redact

# Final answers of the store: a retry would get the same one.
LOGIN_CODES = ("CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED", "UNAUTHENTICATED")
_FINAL_CODES = (*LOGIN_CODES, "BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST")
# The same of files: something is in the way, or may not be written to.
_FINAL_ERRNOS = (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EPERM, errno.EROFS)


def one_line(error: BaseException) -> str:
    """Return the reason in `error` as one redacted line of at most 300 characters."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return redact(f"{error.strerror}: {error.filename}")
    text = redact(str(error))
    if "timed out" in text or "timeout" in text.lower():
        return "no answer in time"
    # Only the end of the chain of wrapped network errors is of use to a reader.
    if found := re.search(r"\[Errno -?\d+\] ([\w -]+)", text):
        return found[1].strip()
    if re.search("Connection (?:broken|aborted)", text):
        return "the connection broke in mid answer"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def import_mlflow() -> Any:
    """Import and return MLflow, with its log at warnings, and its run links and telemetry off.

    The user's environment variables (``MLFLOW_LOGGING_LEVEL``, ``MLFLOW_DISABLE_TELEMETRY``, …) take precedence.
    """
    level_is_ours = os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING") == "WARNING"
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # With MLflow's 7 retries a caller waits four minutes for a missing server; 3 take 15 seconds.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    import mlflow

    if level_is_ours:  # MLflow may have been imported before, with its default level
        # The second prints a traceback of every database error, which is also raised.
        for name, level in (("mlflow", logging.WARNING), ("mlflow.store.db.utils", logging.CRITICAL)):
            logger = logging.getLogger(name)
            if logger.level != level:  # setting it clears what all loggers have cached
                logger.setLevel(level)
    return mlflow


def connect(uri: str) -> Any:
    """Return an ``MlflowClient`` whose runs and models are both at `uri`, without a request."""
    return import_mlflow().MlflowClient(tracking_uri=uri, registry_uri=uri)


def pages(ask: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield MLflow's results page by page, on demand; `ask` maps a page's token to the page.

    MLflow's own ``get_results_from_paginated_fn`` requests all pages first.
    """
    token: str | None = ""
    while token is not None:
        page = ask(token or None)
        yield from page
        token = page.token or None


def post(uri: str, endpoint: str, body: dict[str, object], timeout: tuple[float, float]) -> None:
    """Send one request to the MLflow server at `uri`, without retries, with MLflow's authentication and TLS settings.

    MLflow's client retries for minutes, which only environment variables of the whole process change; here the caller
    decides. `timeout` is (connect, read) in seconds. Raises MlflowException.
    """
    import_mlflow()
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    response = http_request(
        get_default_host_creds(uri), endpoint, "POST", max_retries=0, timeout=timeout, raise_on_status=False, json=body
    )
    verify_rest_response(response, endpoint)


@contextmanager
def unless(*codes: str) -> Iterator[None]:
    """Leave the body silently if MLflow raises an error with one of these codes."""
    import_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in codes:
            raise


def is_final(error: BaseException) -> bool:
    """Tell whether `error` is the store's final answer, not a failure to answer."""
    return getattr(error, "error_code", None) in _FINAL_CODES


class TrackingError(RunFailedError, UnansweredError):
    """The store does not answer."""


@contextmanager
def failures(uri: str, doing: str) -> Iterator[None]:
    """Turn an error of the store at `uri` into a RunFailedError of one redacted line, naming the action `doing`.

    It is a TrackingError unless the error is the store's final answer, or one of files that waiting does not mend.
    """
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        of_files = isinstance(error, OSError) and error.errno in _FINAL_ERRNOS
        kind = RunFailedError if is_final(error) or of_files else TrackingError
        # Without the cause, whose text may hold the URI's password.
        raise kind(f"tracking at {redact(uri)} could not {doing}: {one_line(error)}") from None
