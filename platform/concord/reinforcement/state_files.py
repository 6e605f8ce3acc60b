"""RLlib's state in a checkpoint, without pickle: arrays as safetensors, everything else as JSON.

RLlib's own files are pickles; its MessagePack files contain pickles if an array has objects. Since a checkpoint may
come from somebody else, RLlib's state (``get_state``, ``set_state``) is written to these files instead.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

_ARRAYS, _TREE = "training.safetensors", "training.json"


def write_state(folder: Path, state: Any) -> None:
    """Write a tree of mappings, sequences, arrays and JSON's values."""
    arrays: dict[str, Any] = {}

    def tree(value: Any) -> Any:
        if isinstance(value, dict):
            return {"items": [[key, tree(each)] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            return [tree(each) for each in value]
        if isinstance(value, np.ndarray | np.generic):
            name = str(len(arrays))
            # Safetensors writes wrong values of an array that is not contiguous, such as weights with channels last.
            arrays[name] = np.asarray(value, order="C")
            return {"array": name}
        return value

    (folder / _TREE).write_text(json.dumps(tree(state)))
    save_file(arrays, folder / _ARRAYS)


def read_state(folder: Path) -> Any:
    """Read a tree that :func:`write_state` wrote; tuples become lists."""
    arrays = load_file(folder / _ARRAYS)

    def value(tree: Any) -> Any:
        if isinstance(tree, list):
            return [value(each) for each in tree]
        if isinstance(tree, dict):
            return {key: value(each) for key, each in tree["items"]} if "items" in tree else arrays[tree["array"]]
        return tree

    return value(json.loads((folder / _TREE).read_text()))
