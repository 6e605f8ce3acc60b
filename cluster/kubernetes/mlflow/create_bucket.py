"""Make the bucket that MLflow keeps artifacts in, if it is not there yet; wait for the storage to come up."""

import sys
import time

import boto3
from botocore.exceptions import BotoCoreError, ClientError

LONGEST_WAIT = 300  # seconds


def create_bucket(endpoint: str, bucket: str) -> None:
    """Make the bucket with the credentials of the environment.

    Raises:
        ClientError: the storage refuses, for example the credentials.
        BotoCoreError: it could not be reached for five minutes.
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
            # A gateway that is up before its filer answers so; a refusal will not change.
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500 or time.monotonic() > end:
                raise
        except BotoCoreError:
            if time.monotonic() > end:
                raise
        time.sleep(2)


if __name__ == "__main__":
    create_bucket(*sys.argv[1:])
