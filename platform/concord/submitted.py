"""What a submitted command knows of its submitter, who reads its lines elsewhere.

The commands that it prints are those that the submitter can type: ``concord submit …``, with paths of their machine.
"""

import os
import shlex
from pathlib import Path

SUBMISSION = "CONCORD_SUBMISSION"
"""The variable with the id of the submission, in its own processes; it stays when the same is submitted again."""
SUBMISSION_TAG = "ray.submission"
"""The tag of a run in MLflow with the id of its submission."""
FOLDER = "CONCORD_SENT_FOLDER"
"""The folder that was sent, as the submitter gave it; in the submission it is the working directory."""
OPTIONS = "CONCORD_SUBMIT_OPTIONS"
"""The options of ``concord submit``, for a shell."""
BEGUN = "begun: "
"""The beginning of a submission's line after which its options, data and tracking were found right."""
SUBMITTED = ("train", "tune", "compare")
"""The commands that can be submitted."""


def is_submitted() -> bool:
    """Whether this process belongs to a submission."""
    return SUBMISSION in os.environ


def typed_path(path: str) -> str:
    """An absolute path as the submitter types it, if it is that of a file that was sent; any other is unchanged."""
    if not is_submitted() or FOLDER not in os.environ or not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(Path(os.environ[FOLDER], Path(path).relative_to(Path.cwd())))


def typed_command(command: str) -> str:
    """A command as the submitter types it; one that cannot be submitted is unchanged."""
    verb, _, rest = command.removeprefix("concord ").partition(" ")
    if not is_submitted() or verb not in SUBMITTED:
        return command
    return " ".join(["concord submit", verb, *filter(None, (rest, os.environ.get(OPTIONS)))])


def submit_variables(identity: str, folder: Path | None, options: list[str]) -> dict[str, str]:
    """The variables that tell a submission of its submitter: its id, the folder that was sent, and the options."""
    return {
        SUBMISSION: identity,
        OPTIONS: shlex.join(options),
        **({} if folder is None else {FOLDER: str(folder)}),
    }
