"""The plan of ``concord compare`` with some words."""

from collections.abc import Sequence

from concord.cli.job_options import read_command
from concord.studies.comparison_plan import ComparisonPlan, plan_comparison
from concord.training import JobFile


def planned(job: JobFile, tables: Sequence[str], words: Sequence[str], *, check: bool = True) -> ComparisonPlan:
    command = read_command("compare", job, [*tables, *words], "concord compare")
    return plan_comparison(command.job, command.tables, command.options, command.given, check=check)
