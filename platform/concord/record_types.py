"""What records and events contain, see :mod:`concord.record`: types for their reader."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypeAliasType, TypedDict

from concord.storage.typed_json import Count, Fields

Metrics = dict[str, float]
Texts = dict[str, str]
_Value = TypeAliasType("_Value", "bool | int | float | str | list[_Value] | None")
_Point = dict[str, _Value]  # of options: :data:`concord.space.Point` as JSON
_Name = Annotated[str, Field(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$")]  # of a folder


class _Key(TypedDict, total=False):
    key: str
    sources: Texts
    data: str | None


class _Tracking(TypedDict):
    experiment: str
    parameters: Fields
    tags: Fields
    key: NotRequired[str]
    artifacts: NotRequired[Fields]


class AnyRecord(TypedDict):
    """A record of any version."""

    version: int
    kind: str


class RunRecord(AnyRecord):
    """The record of a run."""

    job: str
    config: Fields
    store: str
    key: _Key
    tracking: _Tracking
    run_id: NotRequired[str | None]
    group: NotRequired[str]
    stop_when: NotRequired[str]
    sources: NotRequired[Texts]
    origin: NotRequired[Texts]


class _Deciding(TypedDict):
    search: str
    stop_when: str


class _StudyOptions(TypedDict):
    top: Count


class _Criterion(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    selection: Literal["held-out", "validation", "leave-one-out", "oracle", "own"]
    metric: str
    mode: Literal["min", "max"]
    required: NotRequired[Metrics]


class _OwnPoint(TypedDict):
    point: _Point
    moved: _Point


class StudyRecord(RunRecord):
    """The record of a study."""

    deciding: _Deciding
    own: _OwnPoint | None
    criterion: _Criterion
    measure: str
    modes: dict[str, Literal["min", "max"] | None]
    method: str
    space: Fields
    oracle: str | None
    validation: bool
    options: _StudyOptions
    given: list[str]
    started: float
    model: NotRequired[str | None]
    champion: NotRequired[bool]
    registration: NotRequired[str | None]


class _Folds(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    environments: list[str]
    measure: str
    mode: Literal["min", "max"]
    folds: NotRequired[list[list[str]]]


_Asked = TypedDict("_Asked", {"left out": NotRequired[_Folds]})  # and the given options, by name


class ComparisonRecord(RunRecord):
    """The record of a comparison."""

    asked: NotRequired[dict[str, _Asked]]


RECORD_TYPES: Mapping[str, type] = {"run": RunRecord, "study": StudyRecord, "comparison": ComparisonRecord}


class _Event(TypedDict):
    event: str
    at: Count


class _Began(_Event):
    resumed: NotRequired[bool]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class _Part(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    name: str
    purpose: str
    examples: Count
    leaves: list[Annotated[tuple[str, list[Count], str], BeforeValidator(_as_tuple)]]
    digest: str


class _Data(_Event):
    parts: list[_Part]


class _Step(_Event):
    step: Count
    metrics: Metrics


class _Evaluated(_Step):
    epoch: Count


class _Checkpoint(_Event):
    name: Annotated[str, Field(pattern=r"^checkpoint_\d{1,18}$")]


class _Artifact(_Event):
    path: str


class _AskedCell(_Event):
    kind: Literal["cell"]
    run: _Name
    key: str


class _AskedTrial(_Event):
    kind: Literal["trial", "left-out", "seed", "winner"]
    run: _Name
    key: str
    trial: Count
    point: _Point
    resolved: NotRequired[_Point]
    seed: NotRequired[Count | None]
    left_out: NotRequired[str | list[str] | None]


class _Report(TypedDict):
    job: str
    name: str
    run_id: str
    seconds: float
    model: str | None
    champion: bool
    registration: str | None
    artifacts: str
    metrics: Metrics


class _Note(_Event):
    part: Literal["beginning", "result", "stopped"]
    text: str


class _Ended(_Event):
    status: Literal["FINISHED", "FAILED", "KILLED"]
    failure: NotRequired[str | None]
    stopped: NotRequired[str | None]
    report: NotRequired[_Report]
    untracked: NotRequired[_Report]


EVENT_TYPES: Mapping[str, Any] = {
    "began": _Began,
    "data": _Data,
    "metrics": _Step,
    "system": _Step,
    "evaluated": _Evaluated,
    "checkpoint": _Checkpoint,
    "artifact": _Artifact,
    "asked": Annotated[_AskedCell | _AskedTrial, Field(discriminator="kind")],
    "note": _Note,
    "ended": _Ended,
}
