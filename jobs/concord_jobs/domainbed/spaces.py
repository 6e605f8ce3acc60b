"""DomainBed's search spaces of the methods that Concord also has.

Appendix D of Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021; for later methods, the spaces that
their authors added to DomainBed. Batch sizes are powers of two.
"""

from collections.abc import Mapping
from typing import Any

from concord.space import Choice, Entry, LogUniform, Space, Uniform
from concord.training import Study

STEPS = 5001  # of a run in DomainBed


def _warmup(low: float, high: float) -> LogUniform:
    """The steps of DomainBed's annealing as a fraction of its run."""
    return LogUniform(low / STEPS, min(high / STEPS, 0.999))


def _studies(shared: Mapping[str, Entry], fewest: int, most: int) -> dict[str, Study]:
    """A study of each method; the linear head has between `fewest` and `most` weights and biases."""

    def study(**entries: Any) -> Study:
        return Study(Space({**shared, **entries}))

    def objective(name: str, **entries: Any) -> Study:
        return study(objective=name, aggregator="mean", **entries)

    penalty = {"penalty_weight": LogUniform(0.1, 1e5), "penalty_warmup": _warmup(1, 1e4)}
    moments = {"penalty_weight": LogUniform(0.1, 10.0)}
    return {
        "erm": study(aggregator="mean"),
        "irm": objective("irm", **penalty),
        "vrex": objective("vrex", **penalty),
        "group-dro": objective("group-dro", group_rate=LogUniform(1e-3, 1e-1)),
        "mixup": objective("mixup", mixup_alpha=LogUniform(0.1, 10.0)),
        "coral": objective("coral", **moments),
        "mmd": objective("mmd", **moments),
        "sd": objective("sd", penalty_weight=LogUniform(1e-5, 0.1)),
        "iga": objective("iga", penalty_weight=LogUniform(10.0, 1e5)),
        # DomainBed's λ, 10 to 10,000, is our weight times the head's number of weights.
        "fishr": objective(
            "fishr",
            penalty_weight=LogUniform(10 / most, 10_000 / fewest),
            penalty_warmup=Uniform(0.0, 0.999),
            variance_momentum=Uniform(0.9, 0.99),
        ),
        "eqrm": objective("eqrm", quantile=Uniform(0.5, 0.99), penalty_warmup=_warmup(10**2.5, 10**3.5)),
        "and-mask": study(aggregator="and-mask", threshold=Uniform(0.5, 1.0)),
        "sand-mask": study(aggregator="sand-mask", threshold=Uniform(0.0, 1.0)),
    }


# Images of 28 × 28, of 2 or 10 classes.
SMALL_IMAGES = _studies(
    {"lr": LogUniform(10**-4.5, 10**-2.5), "batch_size": Choice(8, 16, 32, 64, 128, 256, 512)}, 2 * 129, 10 * 129
)
# Photographs: the heads are those of VLCS with a ResNet-18 to OfficeHome with a ResNet-50. Without DomainBed's dropout.
PHOTOGRAPHS = _studies(
    {
        "lr": LogUniform(10**-5, 10**-3.5),
        "batch_size": Choice(8, 16, 32),
        "l2": LogUniform(1e-6, 1e-2),
        "regularization": "coupled",
    },
    5 * 513,
    65 * 2049,
)
