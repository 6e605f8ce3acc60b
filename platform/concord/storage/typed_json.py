"""The one reader of JSON that Concord itself has written: a value that has not its type is refused with its field.

A type is what pydantic takes: a ``TypedDict``, ``list[int]``, ``Annotated[int, Field(ge=0)]``. Fields that it does not
name may be there. The value is returned as it was written.
"""

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things, a position in a file, or milliseconds since 1970."""
Fields = dict[str, JsonValue]
"""An object of any JSON values."""
_LONGEST_FIELD = 6  # names of nested fields


def read_json(text: str | bytes, kind: Any) -> Any:
    """The JSON value of this text, if it is of this type; else a ValueError of one line, with the field."""
    value = parse_json(text)
    require_type(value, kind)
    return value


def parse_json(text: str | bytes) -> Any:
    """The JSON value of this text (ValueError if it has none); NaN and infinities as Python writes them."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())  # else it would guess the encoding
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def require_type(value: Any, kind: Any) -> None:
    """Refuse a value that is not of this type: a ValueError of one line, with the field."""
    type_check(kind)(value)


@functools.cache
def type_check(kind: Any) -> Callable[[Any], None]:
    """A function that refuses values that are not of this type, for thousands of values; see :func:`require_type`."""
    validate = TypeAdapter(kind).validator.validate_python  # the adapter's own method does more

    def check(value: Any) -> None:
        try:
            validate(value, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"][:_LONGEST_FIELD]))
            raise ValueError(f"{field or 'the whole'}: {first['msg'].removeprefix('Input ')}") from None

    return check
