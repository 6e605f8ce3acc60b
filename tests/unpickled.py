"""A pickle that shows whether anybody unpickled it."""

import os
from pathlib import Path


class Program:
    """Unpickled, it makes a folder."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.witness),)
