"""Create the jobs' user on the MLflow server, with the secret's password; wait for the server to start."""

import os
import sys
import time
import urllib.error
import urllib.request

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from mlflow.server import get_app_client

LONGEST_WAIT = 300  # seconds


def wait_for(address: str) -> None:
    """Return when the server answers; TimeoutError after five minutes."""
    end = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise TimeoutError(f"{address} did not answer within {LONGEST_WAIT} s")


def add_user(address: str, name: str, password: str) -> None:
    """Create the user, who is no administrator, or change the password of an existing one.

    The administrator's credentials are those of the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD).
    """
    client = get_app_client("basic-auth", tracking_uri=address)
    try:
        client.create_user(name, password)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
        client.update_user_password(name, password)
        client.update_user_admin(name, False)


if __name__ == "__main__":
    os.environ["MLFLOW_TRACKING_USERNAME"] = os.environ["MLFLOW_AUTH_ADMIN_USERNAME"]
    os.environ["MLFLOW_TRACKING_PASSWORD"] = os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"]
    wait_for(sys.argv[1])
    add_user(sys.argv[1], os.environ["JOBS_USERNAME"], os.environ["JOBS_PASSWORD"])
