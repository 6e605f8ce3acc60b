"""The options of ``concord compare``: those of a comparison, and those of the job, for all its configurations."""

from dataclasses import dataclass, field

from concord.options import OptionGroup
from concord.studies.options import SharingOptions, with_config
from concord.training import RunConfig


@dataclass(frozen=True, kw_only=True)
class CompareOptions(OptionGroup):
    """Train what tables of the job need and is not there yet: concord compare JOB [TABLE…]. Options of the job given
    here hold for every configuration."""

    # fmt: off
    seeds: int | None = None
    """Seeds of each configuration; the table's own number if not given."""
    first_seed: int | None = None
    """The first of them; the table's own if not given."""
    sharing: SharingOptions = field(default_factory=SharingOptions)
    # fmt: on

    def check(self) -> None:
        """Refuse values that cannot be meant (InputError)."""
        super().check()
        for option, least in (("seeds", 1), ("first_seed", 0)):
            value = getattr(self, option)
            said = "must not be negative" if least == 0 else f"must be at least {least}"
            self.require(option, value is None or value >= least, said)


@dataclass(frozen=True, kw_only=True)
class CompareCommand(OptionGroup):
    """The options of ``concord compare``: the comparison's, and those that every run starts from."""

    comparison: CompareOptions
    config: RunConfig


def options_for(config: RunConfig) -> CompareCommand:
    """The comparison's options and a job's, at their defaults.

    Raises:
        InputError: the job has an option that means something else here.
    """
    return with_config(CompareCommand, "comparison", CompareOptions(), config, "compare")
