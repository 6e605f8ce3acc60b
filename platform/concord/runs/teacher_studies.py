"""The spaces that the thesis on learning to distill trajectories searches, for its jobs (appendix C).

The thesis chose by the test. Here validation examples choose; ``--selection oracle`` is the thesis' way.
"""

from collections.abc import Mapping

from concord.space import Choice, Entry, Integers, LogUniform, Space, Uniform
from concord.training import Study

_STUDENT: dict[str, Entry] = {
    "lr": Choice(1e-3, 1e-2), "l2": Choice(0.0, 1e-5, 1e-4), "regularization": "coupled",
}  # fmt: skip


def _studies(methods: Mapping[str, Mapping[str, Entry]]) -> Mapping[str, Study]:
    return {name: Study(Space(entries), selection="validation") for name, entries in methods.items()}


RETURNS = _studies(
    {
        "ldt": {  # Table C.4; the base of the coefficient's logarithm is taken to be 10
            "teacher": "meta",
            "meta_beta1": Choice(0.0, 0.9),
            "unrolled_lr": Choice(1e-3, 5e-3, 1e-2),
            "teaching_weight": Choice(10**2.0, 10**2.5, 10**3.0),
            "validation_fraction": Choice(0.3, 0.5, 0.7),
        },
        "none": {"teacher": "none", **_STUDENT, "batch_size": Choice(8, 16, 32)},  # Table C.2
        "predicting": {"teacher": "none", **_STUDENT, "auxiliary_weight": Choice(1.0, 2.0, 4.0)},  # Table C.3
    }
)
"""Returns in MuJoCo: grids, of which TPE draws."""

# Of appendix C.3 the largest batch, number of maps and n are legible, and that most ranges are logarithmic. The other
# bounds are ours.
_LIFE: dict[str, Entry] = {"lr": LogUniform(1e-4, 1e-2), "batch_size": Integers(16, 128), "filters": Integers(4, 32)}
_TAUGHT: dict[str, Entry] = {"teaching_weight": LogUniform(1.0, 1e3)}
LIFE = _studies(
    {
        "ldt": {
            "teacher": "meta",
            **_LIFE,
            **_TAUGHT,
            "unrolled_steps": Integers(1, 32),
            "meta_lr": LogUniform(1.0, 1e3),
            "meta_momentum": Uniform(0.0, 0.99),
            "validation_fraction": LogUniform(0.02, 0.5),
        },
        "none": {"teacher": "none", **_LIFE},
        "fixed": {"teacher": "fixed", **_LIFE, **_TAUGHT},
        "oracle-teacher": {"teacher": "oracle", **_LIFE, **_TAUGHT},
    }
)
"""The Game of Life."""
