"""Empirical risk minimization."""

from typing import ClassVar

from concord.objectives.objective import Objective


class ERM(Objective):
    """The mean of the environments' risks: (1/d) Σ R_e(f)."""

    display_name: ClassVar[str | None] = "ERM"
    coupled: ClassVar[bool] = False
    averages = True
    compares: ClassVar[bool] = False
