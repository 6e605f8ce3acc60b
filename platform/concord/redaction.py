"""Which names hold secrets, and how secrets are hidden: one rule for records, parameters, messages and packages.

A name is read as words (``hubToken``, ``HUB_TOKEN`` and ``hub-token`` are *hub token*), and its last words decide:
``api_key`` is secret, ``key_size`` is not; ``hub_token`` is, ``max_tokens``, ``pad_token`` and ``tokenizer`` are not.
A hidden value becomes :data:`HIDDEN`.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

HIDDEN = "***"

_SECRET_WORDS = frozenset(
    {
        "authorization", "bearer", "cookie", "credential", "credentials", "creds", "jwt", "passphrase", "passphrases",
        "passwd", "password", "passwords", "pwd", "secret", "secrets", "token",
    }
)  # fmt: skip
# Endings without a separator, as in PGPASSWORD or clientsecret; no ordinary word ends so.
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "credential", "credentials", "clientsecret")
# Words that make a key, a pass or tokens secret: "key" alone may be that of a dictionary.
_SECRET_PAIRS = {
    "key": frozenset(
        {
            "access", "account", "api", "app", "application", "auth", "aws", "azure", "client", "consumer",
            "decryption", "deploy", "encryption", "gpg", "hf", "hmac", "host", "license", "master", "openai", "pgp",
            "private", "rsa", "secret", "server", "service", "session", "shared", "signing", "ssh", "ssl", "storage",
            "subscription", "tls", "wandb",
        }
    ),
    "pass": frozenset({"admin", "database", "db", "ftp", "http", "mongo", "mysql", "pg", "postgres", "proxy", "redis",
                       "root", "smtp", "sudo", "user"}),
    "tokens": frozenset({"access", "api", "auth", "bearer", "github", "gitlab", "hf", "hub", "huggingface", "refresh",
                         "security", "session", "wandb"}),
    "auth": frozenset({"basic", "http", "proxy"}),
    "string": frozenset({"connection"}),
    "signature": frozenset({"amz", "goog"}),
}  # fmt: skip
_SECRET_PAIRS["keys"] = _SECRET_PAIRS["key"]
# Two words that are often written as one.
_RUN_TOGETHER = frozenset(f"{first}{last}" for last in ("key", "keys") for first in _SECRET_PAIRS["key"]) | {
    "accesstoken", "apitoken", "authtoken", "refreshtoken", "sessiontoken",
}  # fmt: skip
# Tokens of a text: options of language models.
_ORDINARY_TOKENS = frozenset(
    {
        "bos", "class", "cls", "end", "eos", "first", "image", "last", "mask", "max", "min", "n", "next", "num",
        "number", "pad", "padding", "per", "sep", "special", "start", "stop", "unk", "unknown",
    }
)  # fmt: skip
# Words that may follow the name of a secret: api_key_value, access_key_id (the public half is hidden as well).
_FOLLOWING = {"value": None, "base64": None, "b64": None, "id": "key"}
# Credentials in an address; as the name of an option these may be ordinary.
_SECRET_QUERIES = frozenset({"key", "sig", "signature", "auth", "pass"})

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# The user part of "scheme://user:secret@host", with or without the secret.
_USER_INFO = re.compile(r"://([^/@\s:]*)(:\S*)?@")
# An address that was a path has one slash: s3:/user:secret@bucket. Other text has this form, such as models:/name@best.
_USER_INFO_OF_PATH = re.compile(r"\b(s3|gs|gcs|abfss?|hdfs|viewfs|https?):/([^/@\s:]+):[^/@\s]+@")
# A query's name and value, or an assignment's: ?password=…, AccountKey=…, --hub-token=…
_ASSIGNED = re.compile(r"(?P<before>[?&]?)(?P<name>[\w.~%-]+)=(?P<value>(?:[^&\s'\";,]|[;,](?![\w.-]+=))+)")
# An entry of a printed dictionary: 'api_key': 'abc'
_ENTRY = re.compile(r"(?P<name>(['\"])[\w.-]+\2)(?P<between>\s*:\s*)(['\"])(?:\\.|(?!\4).)+\4")
_HEADER = re.compile(r"(?i)\b(authorization['\"]?\s*:\s*['\"]?(?:(?:bearer|basic|token)\s+)?)[^\s'\"]+")

_KEY_FILES = frozenset(
    {
        "_netrc", "application_default_credentials", "auth_token", "credentials", "htpasswd", "id_dsa", "id_ecdsa",
        "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "id_rsa", "kubeconfig", "netrc", "pgpass", "service-account",
        "service_account",
    }
)  # fmt: skip
_KEY_ENDINGS = (
    ".env", ".gpg", ".jks", ".kdbx", ".key", ".keystore", ".kubeconfig", ".p12", ".p8", ".pem", ".pfx", ".pgp", ".ppk",
    ".tfstate", ".tfvars", "_dsa", "_ecdsa", "_ed25519", "_rsa",
)  # fmt: skip
# Endings of files of settings; source code (credentials.py) is never secret.
_SETTINGS = frozenset(
    {
        "", ".bak", ".cfg", ".conf", ".csv", ".enc", ".ini", ".json", ".old", ".properties", ".toml", ".txt", ".xml",
        ".yaml", ".yml",
    }
)  # fmt: skip


@functools.cache
def is_secret(name: str) -> bool:
    """Tell whether an option, parameter, tag or variable of this name (``api_key``, ``hub.token``) holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name) if not word.isdigit()]
    while len(words) > 1 and words[-1] in _FOLLOWING and _FOLLOWING[words[-1]] in (None, words[-2]):
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _ORDINARY_TOKENS
    if last in _SECRET_WORDS or last in _RUN_TOGETHER or last.endswith(_SECRET_ENDINGS):
        return True
    return before in _SECRET_PAIRS.get(last, ())


def redact(text: str) -> str:
    """Return `text` with the passwords and tokens of every URI, assignment and header in it replaced by ``***``.

    A user name before a password is kept; user information without a password is treated as a token.
    """
    text = _USER_INFO.sub(_user_info, text)
    text = _USER_INFO_OF_PATH.sub(rf"\1://\2:{HIDDEN}@", text)
    text = _ASSIGNED.sub(_assigned, text)
    text = _ENTRY.sub(_entry, text)
    return _HEADER.sub(rf"\1{HIDDEN}", text)


def _user_info(found: re.Match[str]) -> str:
    if found[2]:
        return f"://{found[1]}:{HIDDEN}@"
    # Azure's abfss://CONTAINER@ACCOUNT… has no user.
    return found[0] if found.string[: found.start()].endswith(("abfs", "abfss")) else f"://{HIDDEN}@"


def _assigned(found: re.Match[str]) -> str:
    name = found["name"]
    hide = is_secret(name) or (found["before"] and name.lower() in _SECRET_QUERIES)
    return f"{found['before']}{name}={HIDDEN}" if hide else found[0]


def _entry(found: re.Match[str]) -> str:
    return f"{found['name']}{found['between']}{found[4]}{HIDDEN}{found[4]}" if is_secret(found["name"]) else found[0]


def redact_words(words: Sequence[str]) -> list[str]:
    """A command's words with the values of secret options (``--hub-tokens VALUE VALUE``) hidden."""
    shown, hide = [], False
    for word in words:
        if word.startswith("--"):
            hide = "=" not in word and is_secret(word)
            shown.append(redact(word))
        else:
            shown.append(HIDDEN if hide else redact(word))
    return shown


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without secrets, nested ones included, as they are recorded and shown.

    Empty values and booleans are kept, since they reveal nothing.
    """
    return {str(name): _without(value, is_secret(str(name))) for name, value in values.items()}


def _without(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without(each, secret or is_secret(str(name))) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without(each, secret) for each in value) if type(value) in (list, tuple) else value
    if value is None or value == "" or isinstance(value, bool):
        return value
    if secret:
        return HIDDEN
    return redact(value) if isinstance(value, str) else value


def is_hidden(value: Any) -> bool:
    """Tell whether :func:`without_secrets` hid a recorded value or a part of it."""
    if isinstance(value, Mapping):
        return any(map(is_hidden, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_hidden, value))
    return isinstance(value, str) and HIDDEN in value


def is_secret_file(path: PurePath) -> bool:
    """Tell whether a file of this name (``server.PEM``, ``kubeconfig``, ``hub_token.txt``) holds secrets."""
    name = path.name.lower()
    stem, _, ending = name.partition(".") if not name.startswith(".") else (name, "", "")
    if name.endswith(_KEY_ENDINGS) or name in _KEY_FILES:
        return True
    if not {f".{each}" if each else "" for each in ending.split(".")} <= _SETTINGS:
        return False
    return (
        stem in _KEY_FILES
        or stem.startswith(("client_secret", "service-account", "service_account"))
        or is_secret(stem)
    )
