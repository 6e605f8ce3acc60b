"""Colored MNIST: a colour that misleads in the test (Bae et al., Meta-Learned Invariant Risk Minimization, section 4).

``concord train colored-mnist --objective irm`` trains one model; ``concord compare colored-mnist`` makes the paper's
tables and figures over seeds.

The champion is the version with the least spread of held-out losses between the training environments, the paper's
criterion (its section 3.3). The loss itself cannot distinguish a model of shapes from a model of colours, since colours
also lower the loss. An untrained network has no spread, so a champion must also classify: its advantage over chance in
the worst environment is at least half of the largest that label noise permits without colours. A run with
``--stop-spread`` must have reached it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from concord.environments import Environments
from concord.environments.images import ImageOptions
from concord.models import MLP, OneLogit, Pixels
from concord.models.mlp_options import MLPOptions
from concord.objectives import MetaIRM
from concord.options import group, option_values
from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.training import Job, Run, Study, TrainConfig
from concord.training.evaluation import correct
from concord_jobs.colored_mnist.data import ColoredMNIST, ColourOptions
from concord_jobs.colored_mnist.figures import images_figure
from concord_jobs.colored_mnist.similarity import adapted_similarities, layer_outputs, pwcca

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class ColoredMNISTConfig(TrainConfig):
    """Colored MNIST: two training environments whose colours mislead seldom, tests whose colours mislead more."""

    colours: ColourOptions = group(ColourOptions, observed_flips=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    # fmt: off
    examples: int = 25_000
    """Number of training examples of each environment; held-out examples are additional."""
    one_logit: bool = False
    """A network with one output, the logit of class 1, in place of two."""
    similarity: bool = False
    """Measure the similarity of representations at the end (PWCCA): under other colours, with meta-irm before and after
    the inner steps."""
    mlp: MLPOptions = group(MLPOptions)
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        super().check()
        self.require_at_least(1, "examples")
        two = not self.one_logit or self.colours.classes == 2
        self.require("one_logit", two, f"one output tells two classes apart; --classes is {self.colours.classes}")
        compared = not self.similarity or len(self.colours.observed_flips) > 0
        self.require("similarity", compared, "compares with the first of --observed-flips; give one")


def environments(config: ColoredMNISTConfig) -> Environments:
    """The coloured digits."""
    data, colours = ImageOptions(dataset="mnist").images(config.data.data), option_values(config.colours)
    examples = round(config.examples / (1 - config.data.held_out))
    most = len(data.train) // len(config.colours.flips)
    expected = f"with --held-out {config.data.held_out:g} that is {examples} for each environment; {most} are there"
    config.require("examples", examples <= most, expected)
    coloured = ColoredMNIST(train=data.train, test=data.test, examples=examples, seed=config.run.seed, **colours)
    return coloured.as_environments()


def model(config: ColoredMNISTConfig) -> nn.Module:
    """An MLP with ReLU, on pixels of 0 to 1."""
    colours = config.colours
    width = (1 if colours.grey else colours.classes) * colours.side**2
    outputs = 1 if config.one_logit else colours.classes
    network = MLP(width, outputs, **option_values(config.mlp), activation="relu")
    return nn.Sequential(Pixels(), OneLogit(network) if config.one_logit else network)


def required(config: ColoredMNISTConfig) -> Mapping[str, float]:
    """The mean of chance and the best accuracy without colours (62.5 % with two classes); and the spread to stop at."""
    least = {"worst_held_out_accuracy": (1 - config.colours.noise + 1 / config.colours.classes) / 2}
    return least | ({"spread_reached": 1.0} if config.schedule.stop_spread > 0 else {})


def figures(
    job: Job[ColoredMNISTConfig], config: ColoredMNISTConfig, outcome: Run, trained: nn.Module
) -> "Mapping[str, Figure]":
    """Images of the training environments and of the test."""
    data = environments(config)
    shown = {name: (data[name].inputs, data[name].targets) for name in (*data.train, *data.test)}
    return {"images": images_figure(shown)}


def scale_slope(outputs: Tensor, targets: Tensor) -> Tensor:
    """The derivative of each example's cross-entropy by a factor on its outputs; IRMv1 squares the mean."""
    probabilities = outputs.softmax(1)
    return (probabilities * outputs).sum(1) - outputs.gather(1, targets[:, None])[:, 0]


def similarities(config: ColoredMNISTConfig, trained: nn.Module) -> Mapping[str, float]:
    """PWCCA of representations of the test digits under other colours with those at the first monitored p_e (A.2), and
    with meta-IRM of each layer before and after the inner steps (A.1).

    The representation is the last layer's input; with irm, whose fixed classifier comes last, the last layer's output.
    """
    if not config.similarity:
        return {}
    data, colours, device = environments(config), config.colours, next(trained.parameters()).device
    tests = {flip: f"flip-{flip:g}" for flip in colours.observed_flips} | {colours.test_flip: data.test[0]}
    representations = {}
    for flip, name in tests.items():
        *_, hidden, outputs = layer_outputs(trained, data[name].inputs.to(device)).values()
        representations[flip] = outputs if config.objective.objective == "irm" else hidden.relu()
    first = representations[colours.observed_flips[0]]
    measured = {f"pwcca_{flip:g}": pwcca(first, each) for flip, each in representations.items()}
    objective = config.objective.build(nn.functional.cross_entropy, 1)
    if isinstance(objective, MetaIRM):
        training = {name: tuple(part.to(device) for part in data[name].data) for name in data.train}
        measured |= adapted_similarities(trained, objective, training)
    return measured


# Nothing in the studies sees a test. IRMv1 is judged by the spread of held-out losses. meta-IRM ends when they are
# equal, the paper's early stopping. Its accuracy then decides, since a model that is sure of nothing has equal losses.
_VARIED: dict[str, Entry] = {
    "lr": LogUniform(5e-4, 3e-3),
    "hidden_layers": Choice(1, 2),
    "l2": LogUniform(1e-6, 1e-2),
    "regularization": "coupled",
}
_IRM: dict[str, Entry] = {
    "objective": "irm", "penalty_weight": LogUniform(1e2, 1e6), "penalty_warmup": Uniform(0.1, 0.6),
}  # fmt: skip
_META_IRM: dict[str, Entry] = {
    "objective": "meta-irm",
    "penalty_weight": LogUniform(0.01, 10.0),
    "penalty_warmup": 0.0,
    "inner_lr": LogUniform(0.05, 2.0),
    "drop_grad": Choice(0.0, 0.1, 0.2, 0.4),
    "milestones": (0.7, 0.85),
    "decay": 0.4,
    "stop_spread": 0.005,  # about the standard error of a held-out loss of 5,000 examples
    "stop_from": 0.5,
}
STUDIES = {
    "irm": Study(Space(_VARIED | _IRM)),
    "meta-irm": Study(Space(_VARIED | _META_IRM), metric="worst_accuracy"),
}

job = Job(
    environments=environments,
    model=model,
    loss=nn.functional.cross_entropy,
    config=ColoredMNISTConfig().with_options(
        held_out=1 / 6,
        precision="bfloat16",
        objective="irm",
        penalty_warmup=0.4,
        epochs=80,
        batch_size=5000,
        lr=2e-3,
        milestones=(),
    ),
    measures={"accuracy": correct, "scale_slope": scale_slope},
    criterion="held_out_spread",
    mode="min",
    required=required,
    final_measures=similarities,
    figures=figures,
    studies=STUDIES,
    reproduces="meta-IRM paper, section 4 and A (Colored MNIST): Fig. 3, 4, 5, 6, 7, 8, 9, 10; Tables 1, 2, 3, 4, 5",
    comparisons="tables.py",
)
