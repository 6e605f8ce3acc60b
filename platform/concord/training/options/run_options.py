"""The options of every tracked run."""

import inspect
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.options import NEEDED, OptionGroup, Place, Scoring, Unkept, flag_of, group, option_values, options_of
from concord.storage import check_address, resolve

LOCAL = "local"  # the address of a Ray on this machine
_LONGEST_NAME = 200  # letters; it is also a folder's name
_LONGEST_EXPERIMENT = 500  # MLflow's limit
_TAG_NAME = re.compile(r"[\w./: -]{1,250}")  # as MLflow accepts it
# Without what divides the parts of a registry's address, or begins an option of the command line.
_MODEL_NAME = re.compile(r"[^-.\s/:@?][^/:@?]*")
MODEL_NAMES = "expected text without '/', ':', '@' and '?' that begins with no '-' or '.'"


def is_model_name(name: Any) -> bool:
    """Whether MLflow and a command can load a model of this name by ``models:/NAME@ALIAS``."""
    return isinstance(name, str) and name.isprintable() and _MODEL_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """The run's name, cluster and folder."""

    # fmt: off
    seed: Scoring[int] = 0
    """Seed of all random numbers: the data's split, batches, initial weights, dropout."""
    name: Unkept[str | None] = None
    """Name of the run; by default the job and the time."""
    output: Place[Path] = DEFAULT_OUTPUT
    """Folder for runs, figures and, without a tracking URI, for MLflow's store; or s3://BUCKET/FOLDER, gs://…"""
    resume: Unkept[bool] = False
    """Continue the run --name from its last checkpoint."""
    tracking_uri: Unkept[str | None] = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI); SQLite under --output if neither is given."""
    tracking_patience: Unkept[float] = 1.0
    """Minutes to wait for an MLflow server and the storage of --output and data, when a run begins and when it ends."""
    experiment: Unkept[str | None] = None
    """MLflow experiment; by default MLFLOW_EXPERIMENT_NAME, else one named after the job."""
    tag: Unkept[tuple[str, ...]] = ()
    """Tags of the run in MLflow, NAME=VALUE, such as team=eyes."""
    register: Place[bool] = True
    """Register the model as a version; otherwise only the run keeps it."""
    model_name: Place[str | None] = None
    """Name of the registered model; by default the job's."""
    address: Unkept[str | None] = None
    """Ray cluster to run on, or local; by default RAY_ADDRESS, else a Ray started on this machine if needed."""
    wait_for_resources: Place[float | None] = None
    """Minutes to wait for CPUs and GPUs that Ray's autoscaler starts; by default 30 on a cluster, 0 on a Ray started
    here. With this option each of several workers reserves a whole CPU."""
    # fmt: on

    @property
    def on_cluster(self) -> bool:
        """Whether the run is for a Ray cluster, not for this machine."""
        return (self.address or os.environ.get("RAY_ADDRESS") or LOCAL) != LOCAL

    @property
    def tags(self) -> dict[str, str]:
        """The tags by name."""
        return {name.strip(): value for name, _, value in (each.partition("=") for each in self.tag)}

    def check(self) -> None:
        """Validate options."""
        self.require_at_least(0, "seed")
        if self.experiment is not None:
            right = bool(self.experiment.strip()) and len(self.experiment) <= _LONGEST_EXPERIMENT
            self.require("experiment", right, f"must be a name of at most {_LONGEST_EXPERIMENT} characters")
        for each in self.tag:
            name, given, _ = each.partition("=")
            if not given or not _TAG_NAME.fullmatch(name.strip()):
                raise InputError(f"--tag {each}: expected NAME=VALUE, with letters, digits and _-./: in the name")
            if name.strip().startswith("concord."):
                raise InputError(f"--tag {each}: names that begin with concord. are Concord's own; give another name")
        self.require("model_name", self.model_name is None or is_model_name(self.model_name), MODEL_NAMES)
        check_address("output", self.output)
        self.require("output", not resolve(self.output).is_file(), "is a file; give a folder")
        for option in ("wait_for_resources", "tracking_patience"):
            minutes = getattr(self, option)
            right = minutes is None or 0 <= minutes < math.inf
            self.require(option, right, "must be a number of minutes, not negative")
        if self.resume and self.name is None:
            raise InputError("--resume: needs the name of the run; give --name")
        if self.name is not None:
            plain = all(letter.isalnum() or letter in "-_." for letter in self.name) and self.name[:1].isalnum()
            self.require("name", plain, "must have letters, digits, '-', '_' and '.' only, a letter or digit first")
            self.require("name", len(self.name) <= _LONGEST_NAME, f"must not be longer than {_LONGEST_NAME} letters")


@dataclass(frozen=True, kw_only=True)
class RunConfig(OptionGroup):
    """The options of every tracked run; a job with a loop of its own adds options as fields of a derived class."""

    run: RunOptions = group(RunOptions)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _refuse_redeclared(cls)

    def derived_options(self) -> dict[str, Any]:
        """The values in use of options whose default follows from other options, as ``auto`` does, by name.

        A job with such options adds them to ``super().derived_options()``.
        """
        return {}

    def resolve(self) -> "ResolvedConfig":
        """These options with the values in use, see :meth:`derived_options`.

        A run is resolved once, where it is checked, and is trained, recorded and drawn with resolved options. A group
        of runs keeps its options as given, so that derived values follow when an option is varied.
        """
        return cast("ResolvedConfig", self.with_options(**self.derived_options()))

    @property
    def method(self) -> str | None:
        """The method, for the run's name; of resolved options."""
        return None

    def sources(self) -> dict[str, str]:
        """The texts of the user's files that options name, by file name; they are kept with the run."""
        return {}

    def gpu_request(self) -> tuple[float, str]:
        """The number of GPUs the run requests from Ray, and the option behind it, in words."""
        return 0.0, ""

    def cpu_request(self) -> tuple[float, str]:
        """The number of CPUs the run requests from Ray, and the option behind it, in words."""
        return 0.0, ""

    def check(self) -> None:
        """Validate options; a job may add its own checks (InputError)."""
        for name, value in option_values(self).items():
            if value is NEEDED:
                raise InputError(f"{flag_of(name)}: is required; give a value")
        OptionGroup.check(self.resolve())


if TYPE_CHECKING:

    class ResolvedConfig(RunConfig):
        """Options of :meth:`RunConfig.resolve`; only a type checker tells them from options as given."""

else:
    ResolvedConfig = RunConfig


def _refuse_redeclared(kind: type[RunConfig]) -> None:
    """Refuse a class that declares an option of a group again: it would have no effect."""
    declared = inspect.get_annotations(kind)
    for base in kind.__mro__[1:]:
        if not (issubclass(base, RunConfig) and "__dataclass_fields__" in base.__dict__):
            continue
        options = options_of(base)
        for name in [*declared, *kind.__dict__]:
            group = base.__dataclass_fields__.get(name)
            if group is not None and isinstance(group.type, type) and issubclass(group.type, OptionGroup):
                again = declared.get(name)
                if not (isinstance(again, type) and issubclass(again, group.type)):
                    raise InputError(f"{kind.__name__}.{name}: is the name of a group of options; rename it")
            elif name in options and options[name].groups:
                value = kind.__dict__.get(name, "…")
                raise InputError(
                    f"{kind.__name__}.{name}: is an option already; to change its default write "
                    f"Job(…, config={kind.__name__}().with_options({name}={value!r}))"
                )
        return
