"""Examples of any form: a tree of tensors (tuples, lists, dictionaries) that all begin with the examples."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any
"""A tensor, or tuples, lists and dictionaries of tensors; each tensor is ``(examples, ...)``."""


def is_pair(tree: Tree) -> bool:
    """Whether the tree is ``(inputs, targets)``."""
    return type(tree) in (tuple, list) and len(tree) == 2 and all(isinstance(part, Tensor) for part in tree)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves by name: ``inputs`` and ``targets`` of a pair, otherwise keys and positions, ``tokens.input_ids``."""
    if is_pair(tree):
        return dict(zip(("inputs", "targets"), tree, strict=True))
    leaves = pytree.tree_flatten_with_path(tree)[0]
    return {leaf_name(path): leaf for path, leaf in leaves}


def leaf_name(path: Sequence[Any]) -> str:
    """The name of the leaf at a path of keys and positions."""
    return ".".join(map(_key, path)) or "data"


def merged(trees: Sequence[Tree], function: Callable[[list[Any]], Any]) -> Tree:
    """A tree of the first one's structure; each leaf is computed from the leaves of that name in all trees."""
    each = [named_leaves(tree) for tree in trees]
    structure = pytree.tree_structure(trees[0])
    return pytree.tree_unflatten([function([leaves[name] for leaves in each]) for name in each[0]], structure)


def described(tree: Tree) -> dict[str, str]:
    """Shape and type of one example, by the names of the leaves."""
    return {
        name: f"{tuple(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"
        for name, leaf in named_leaves(tree).items()
    }


def difference(name: str, form: dict[str, str], other: str, expected: dict[str, str]) -> str | None:
    """The difference in form between two environments' examples, both :func:`described`, in one line."""
    if form.keys() != expected.keys():
        parts = f"{', '.join(form)}, but of {', '.join(expected)}"
        return f"environment {name}: its examples are of {parts} in environment {other}"
    for part, found in form.items():
        if found != expected[part]:
            wrong = f"{found}, but {expected[part]}"
            return f"environment {name}: one example of its {part} is {wrong} in environment {other}"
    return None


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
