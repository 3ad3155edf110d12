"""Carries core records over protobuf messages of the same field names, and refuses what does not fit.

One generic pair instead of a hand-written one per record: a field that is added to a record and not to
its message (or the other way round) fails `tests/unit/test_protos.py` by name.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import TypeAdapter, ValidationError

from relight.core.errors import FieldError, InvalidInput

R = TypeVar("R")
M = TypeVar("M", bound=Message)


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(record: type[R]) -> TypeAdapter[R]:
    # Building one takes milliseconds; there are as many as there are records.
    if record not in _adapters:
        _adapters[record] = TypeAdapter(record)
    return _adapters[record]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def to_proto(record: Any, message: type[M]) -> M:
    """`record` (a dataclass of core/records.py) as a `message`; None becomes an absent field."""
    # The constructor takes nested plain data, in half the time that the JSON parser needs.
    return message(**_without_none(asdict(record)))


def from_proto(message: Message, record: type[R]) -> R:
    """`message` as a `record`. Raises InvalidInput naming each field that is missing or out of range."""
    return from_dict(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        record,
        type(message).__name__,
    )


def from_dict(data: object, record: type[R], what: str) -> R:
    """Plain data (of JSON or YAML) as a `record`. Raises InvalidInput with every wrong field of `what`."""
    try:
        checked: R = _adapter(record).validate_python(data)
        return checked
    except ValidationError as error:
        raise InvalidInput(
            f"not a valid {what}",
            [
                FieldError(
                    ".".join(str(part) for part in found["loc"]) or what,
                    found["msg"],
                    repr(found["input"])[:80],
                )
                for found in error.errors(include_url=False)
            ],
        ) from None
