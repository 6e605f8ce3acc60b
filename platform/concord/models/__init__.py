"""The networks of the papers, as plain ``torch.nn`` modules, each imported when it is used."""

from typing import TYPE_CHECKING

from concord.lazy_names import lazy_names

if TYPE_CHECKING:
    from concord.models.dynamics_network import DynamicsNetwork
    from concord.models.fast_resnet import FastResNet
    from concord.models.impala import ImpalaCNN
    from concord.models.mlp import MLP
    from concord.models.one_logit import OneLogit
    from concord.models.pixels import ChannelsFirst, Pixels
    from concord.models.resnet import ResNet18

__all__ = ["MLP", "ChannelsFirst", "DynamicsNetwork", "FastResNet", "ImpalaCNN", "OneLogit", "Pixels", "ResNet18"]

__getattr__ = lazy_names(
    __name__,
    {
        "concord.models.dynamics_network": ("DynamicsNetwork",),
        "concord.models.fast_resnet": ("FastResNet",),
        "concord.models.impala": ("ImpalaCNN",),
        "concord.models.mlp": ("MLP",),
        "concord.models.one_logit": ("OneLogit",),
        "concord.models.pixels": ("ChannelsFirst", "Pixels"),
        "concord.models.resnet": ("ResNet18",),
    },
)
