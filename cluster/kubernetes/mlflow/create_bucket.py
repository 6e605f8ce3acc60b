"""Make the bucket for MLflow's artifacts, if it does not exist; wait for the storage to start."""

import sys
import time

import boto3
from botocore.exceptions import BotoCoreError, ClientError

LONGEST_WAIT = 300  # seconds


def create_bucket(endpoint: str, bucket: str) -> None:
    """Make the bucket with the credentials of the environment.

    Raises:
        ClientError: the storage refuses the request, for example the credentials.
        BotoCoreError: the storage could not be reached for five minutes.
    """
    client = boto3.client("s3", endpoint_url=endpoint)
    end = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            present = [each["Name"] for each in client.list_buckets().get("Buckets", [])]
            if bucket not in present:
                client.create_bucket(Bucket=bucket)
            return
        except ClientError as error:
            # A gateway that starts before its filer answers with 5xx; a refusal (4xx) will not change.
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500 or time.monotonic() > end:
                raise
        except BotoCoreError:
            if time.monotonic() > end:
                raise
        time.sleep(2)


if __name__ == "__main__":
    create_bucket(*sys.argv[1:])
