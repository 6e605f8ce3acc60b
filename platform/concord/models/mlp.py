"""The multilayer perceptron, as in the AND-mask paper's synthetic experiments (§3.1, appendix B.3)."""

from typing import Literal

from torch import Tensor, nn

Initialization = Literal["kaiming", "default"]
Activation = Literal["leaky-relu", "relu"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"leaky-relu": nn.LeakyReLU, "relu": nn.ReLU}


class MLP(nn.Sequential):
    """Linear layers with LeakyReLU (or ReLU) between them.

    Args:
        inputs: width of one example.
        outputs: number of classes (the last layer gives logits).
        hidden_units: width of each hidden layer.
        hidden_layers: the number of hidden layers.
        dropout: probability of dropping a hidden unit; 0 adds no dropout layers.
        batch_norm: normalize each hidden layer before its nonlinearity.
        initialization: ``kaiming`` draws normal weights with the variance that LeakyReLU keeps and zero
            biases; ``default`` is PyTorch's own.
        activation: the activation between the layers.

    Input ``(batch, inputs)``, output ``(batch, outputs)``.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden_units: int = 256,
        hidden_layers: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = False,
        initialization: Initialization = "kaiming",
        activation: Activation = "leaky-relu",
    ) -> None:
        layers: list[nn.Module] = []
        width = inputs
        for _ in range(hidden_layers):
            layers.append(nn.Linear(width, hidden_units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(hidden_units))
            layers.append(_ACTIVATIONS[activation]())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = hidden_units
        layers.append(nn.Linear(width, outputs))
        super().__init__(*layers)
        if initialization == "kaiming":
            self.apply(_kaiming)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(batch, outputs)``; inputs of more dimensions are flattened to ``(batch, inputs)``."""
        outputs = inputs.flatten(1)
        for layer in self:
            outputs = layer(outputs)
        return outputs


def _kaiming(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, a=0.01, nonlinearity="leaky_relu")
        nn.init.zeros_(module.bias)
