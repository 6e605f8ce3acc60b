"""Keeps the pandas frames of a call as files: a run may be resumed later, and workers of other machines read them."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from concord.errors import InputError, first_line
from concord.options import flag_of
from concord.record import RECORD
from concord.storage import Folder, display_path, is_remote

_FRAMES = "frames"  # in the output folder


def frame_of(value: Any) -> Any:
    """A pandas frame, also of a table of Arrow, Polars or datasets; None of other values. pandas is not imported."""
    if hasattr(value, "to_parquet") and hasattr(value, "iloc"):
        return value
    return value.to_pandas() if hasattr(value, "to_pandas") and hasattr(value, "shape") else None


@dataclass
class FrameFiles:
    """The files of a call's frames. If the call fails, those that it wrote and that no record names are removed."""

    _written: list[Path] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)  # folders

    def __enter__(self) -> "FrameFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            return
        for file in self._written:
            if not any(file.name in each.read_text(errors="replace") for each in file.parents[1].glob(f"*/*/{RECORD}")):
                file.unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()

    def keep(self, option: str, frame: Any, output: Path) -> Path:
        """The file of a frame in the output folder, named by its content.

        Refuses a frame that a Parquet file cannot keep (InputError).
        """
        if is_remote(output):
            raise InputError(
                f"--output {display_path(output)}: a frame is kept in a local folder; give the data as a file"
            )
        frame = frame.rename(columns=str)  # pandas warns of names of several types
        periods = {name: "string" for name, kind in frame.dtypes.items() if str(kind).startswith("period[")}
        try:
            frame = frame.astype(periods) if periods else frame  # 2019Q1
            digest, content = _digest_and_content(frame)
        except Exception as error:  # pandas and Arrow have their own errors
            raise InputError(f"{flag_of(option)}: {_problem(frame) or first_line(error)}") from error
        folder, name = Folder(output / _FRAMES), f"{digest[:24]}.parquet"
        if not (folder.path / name).exists():
            self._made += [each for each in (folder.path, output) if not each.exists()]
            folder.write(name, content)
            self._written.append(folder.path / name)
        return folder.path / name


def _digest_and_content(frame: Any) -> tuple[str, bytes]:
    """What tells a frame from others by rows, names and types, and its Parquet file."""
    import pandas

    # The hash of a row is the same for 1, a category 1, and the first nanosecond after 1970.
    form = [(list(each.columns), list(map(str, each.dtypes))) for each in (frame.index.to_frame(), frame)]
    rows = pandas.util.hash_pandas_object(frame).to_numpy().tobytes()
    return hashlib.sha256(repr(form).encode() + rows).hexdigest(), frame.to_parquet()


def _problem(frame: Any) -> str | None:
    """Which column of a frame a Parquet file cannot keep, and why; None if it is no column alone."""
    for name in frame.columns[frame.columns.duplicated()][:1]:
        return f"{name} is the name of two columns; rename one"
    for name in frame.columns:
        try:
            _digest_and_content(frame[[name]])
        except Exception as error:  # pandas and Arrow have their own errors
            reason = error.args[0] if error.args and isinstance(error.args[0], str) else first_line(error)
            right = "make it numbers, text or dates, or drop it"
            return f"column {name}: cannot be kept in a Parquet file ({reason}); {right}"
    return None
