"""The networks of the papers, as plain ``torch.nn`` modules."""

from concord.models.dynamics_network import DynamicsNetwork
from concord.models.fast_resnet import FastResNet
from concord.models.impala import ImpalaCNN
from concord.models.mlp import MLP
from concord.models.pixels import ChannelsFirst, Pixels
from concord.models.resnet import ResNet18

__all__ = ["MLP", "ChannelsFirst", "DynamicsNetwork", "FastResNet", "ImpalaCNN", "Pixels", "ResNet18"]
