"""The network of an agent: logits of actions, and the expected return."""

import torch
from torch import Tensor, nn

from concord.models import ImpalaCNN


class ActorCritic(nn.Module):
    """The IMPALA network with two linear heads: logits of the actions, and the value of the state.

    Input frames ``(frames, 64, 64, 3)``, uint8, in the form of the environments; output logits ``(frames, actions)``
    and values ``(frames,)``, both float32.
    """

    def __init__(self, actions: int = 15) -> None:
        super().__init__()
        self.encoder = ImpalaCNN()
        width = self.encoder.hidden.out_features
        self.policy = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)
        # The first policy is nearly uniform, so that an untrained network prefers no action.
        for head, scale in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(head.weight, scale)
            nn.init.zeros_(head.bias)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values."""
        # The frames are channels-last in memory, so nothing is copied.
        features = self.encoder(frames.permute(0, 3, 1, 2)).float()
        with torch.autocast(features.device.type, enabled=False):
            return self.policy(features), self.value(features).squeeze(1)


class Policy(nn.Module):
    """The policy of an actor-critic network, from frames to logits: for playing, and for the registry."""

    def __init__(self, network: ActorCritic) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.network(frames)[0]
        return logits
