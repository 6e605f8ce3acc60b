"""The networks of the papers, as plain ``torch.nn`` modules, each imported when it is used."""

from typing import TYPE_CHECKING

from concord.lazy_names import lazy_names

if TYPE_CHECKING:
    from concord.models.dynamics_network import DynamicsNetwork
    from concord.models.fast_resnet import FastResNet
    from concord.models.impala import ImpalaCNN
    from concord.models.mlp import MLP
    from concord.models.pixels import ChannelsFirst, Pixels
    from concord.models.resnet import ResNet18

__all__ = ["MLP", "ChannelsFirst", "DynamicsNetwork", "FastResNet", "ImpalaCNN", "Pixels", "ResNet18"]

__getattr__ = lazy_names(
    __name__,
    {
        "DynamicsNetwork": "concord.models.dynamics_network",
        "FastResNet": "concord.models.fast_resnet",
        "ImpalaCNN": "concord.models.impala",
        "MLP": "concord.models.mlp",
        **dict.fromkeys(("ChannelsFirst", "Pixels"), "concord.models.pixels"),
        "ResNet18": "concord.models.resnet",
    },
)
