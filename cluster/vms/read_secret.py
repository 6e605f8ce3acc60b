"""Print a secret, read with the machine's own role: ``read_secret.py aws REGION NAME``, ``gcp PROJECT NAME``."""

import sys


def aws(region: str, name: str) -> str:
    """A secret of AWS Secrets Manager."""
    import boto3

    secret: str = boto3.client("secretsmanager", region_name=region).get_secret_value(SecretId=name)["SecretString"]
    return secret


def gcp(project: str, name: str) -> str:
    """The latest version of a secret of Google's Secret Manager."""
    import base64

    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    answer = AuthorizedSession(credentials).get(
        f"https://secretmanager.googleapis.com/v1/projects/{project}/secrets/{name}/versions/latest:access", timeout=30
    )
    answer.raise_for_status()
    return base64.b64decode(answer.json()["payload"]["data"]).decode()


if __name__ == "__main__":
    cloud, place, name = sys.argv[1:]
    print({"aws": aws, "gcp": gcp}[cloud](place, name).strip())
