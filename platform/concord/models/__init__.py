"""The networks of the papers, as plain ``torch.nn`` modules."""

from concord.models.mlp import MLP

__all__ = ["MLP"]
