"""The networks of the papers, as plain ``torch.nn`` modules."""

from concord.models.fast_resnet import FastResNet
from concord.models.impala import ImpalaCNN
from concord.models.mlp import MLP
from concord.models.pixels import Pixels

__all__ = ["MLP", "FastResNet", "ImpalaCNN", "Pixels"]
