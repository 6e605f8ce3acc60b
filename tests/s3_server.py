"""A real S3 server for tests: moto's, on loopback. It can be stopped and restarted without losing its objects."""

import logging
from typing import Any

import pytest
from ports import free_port

BUCKET = "concord"
_KEY, _SECRET = "AKIAOFTESTS", "not-to-be-seen-anywhere"


class Server:
    """An S3 server with a fixed address."""

    secret = _SECRET

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: Any = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its clients."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        from moto.server import ThreadedMotoServer  # takes seconds, needed only here

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Stop the server: connections are refused."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def make_bucket(self) -> None:
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        """Amazon's client for this server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=_KEY,
            aws_secret_access_key=_SECRET,
        )

    def keys(self, prefix: str = "") -> list[str]:
        """The names of its objects."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process use this server and no other storage."""
        for name, value in self.environment.items():
            patch.setenv(name, value)
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
