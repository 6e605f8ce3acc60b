"""The options of a record."""

from collections.abc import Mapping
from typing import Any

from concord.errors import InputError
from concord.options import from_plain, options_of
from concord.record import RECORD
from concord.redaction import is_hidden
from concord.storage.typed_json import require_type


def restored_config(defaults: Any, recorded: Mapping[str, Any], source: str = RECORD) -> Any:
    """These options with the values of a record; values of unknown options are left out.

    Secrets, which are not recorded, keep their values. A value that is not of its option's type is an InputError that
    names the ``source``.
    """
    known = {name: value for name, value in recorded.items() if not is_hidden(value)}
    options = options_of(type(defaults))
    values = from_plain(options, known)
    for name, value in values.items():
        try:
            require_type(value, options[name].hint)
        except ValueError as error:
            problem = str(error).partition(": ")[2]
            raise InputError(f"{source}: {name} {problem}, but is {value!r:.80}; restore the file") from error
    return defaults.with_options(**values)
