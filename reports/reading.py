"""A dataclass from a JSON object that anybody may have written, by the annotations of its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST_ENTRIES = 1024  # of a list or an object: an entry an image, a setting or a count
_LIMIT = 1 << 64  # of numbers

# Metadata of a field that is not in the JSON.
NOT_READ = {"read": False}


def within(low: int, high: int = _LIMIT - 1) -> dict[str, Any]:
    """Metadata of a field whose numbers are from ``low`` to ``high``; others are from 0 to 2^64 - 1."""
    return {"range": (low, high)}


def read(kind: type[T], found: Any, longest: int | None = None) -> T:
    """An object of a dataclass. Its fields may hold texts, numbers, switches, None, tuples and dictionaries of these.

    A field without a default must be there; null stands for the default of any other. ``Any`` in a dictionary is the
    value of a setting: a text, a number, a switch or null. Further entries of the JSON are ignored.

    Args:
        longest: characters to which texts are cut.

    Raises:
        ValueError: a value is missing, of another type, or outside its range; its text is the name of the field.
    """
    if not isinstance(found, Mapping):
        raise ValueError(kind.__name__.lower())

    hashable: Any = kind
    values: dict[str, Any] = {}
    for field, expected in _fields(hashable):
        value = found.get(field.name)
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if value is None and has_default:
            continue

        low, high = field.metadata.get("range", (0, _LIMIT - 1))
        try:
            values[field.name] = _read(expected, value, low, high, longest)
        except ValueError:
            raise ValueError(field.name) from None

    return kind(**values)


@lru_cache(maxsize=16)
def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a dataclass that are in the JSON, with their types."""
    types = get_type_hints(kind)
    return [(field, types[field.name]) for field in fields(kind) if field.metadata.get("read", True)]


def _read(expected: Any, value: Any, low: int, high: int, longest: int | None) -> Any:
    """A value of a type; a ValueError if it is of another type, or a number outside ``low`` to ``high``."""
    if expected is Any:
        return _setting(value, longest)

    origin = get_origin(expected)
    inner = get_args(expected)

    if origin is UnionType:
        (only,) = [one for one in inner if one is not NoneType]  # of "float | None"
        return None if value is None else _read(only, value, low, high, longest)

    if origin is tuple and isinstance(value, list) and len(value) <= MOST_ENTRIES:
        if inner[-1] is not Ellipsis and len(inner) != len(value):
            raise ValueError
        return tuple(_read(inner[0], entry, low, high, longest) for entry in value)

    if origin in (dict, Mapping) and isinstance(value, Mapping) and len(value) <= MOST_ENTRIES:
        return {_text(name, longest): _read(inner[1], entry, low, high, longest) for name, entry in value.items()}

    if expected is str:
        return _text(value, longest)
    if expected is bool and isinstance(value, bool):
        return value

    is_number = isinstance(value, int) or expected is float and isinstance(value, float)
    if expected in (int, float) and is_number and not isinstance(value, bool) and low <= value <= high:
        return value
    raise ValueError


def _text(value: Any, longest: int | None) -> str:
    """A text, cut to ``longest`` characters."""
    if not isinstance(value, str):
        raise ValueError
    return value[:longest]


def _setting(value: Any, longest: int | None) -> Any:
    """The value of a setting."""
    if isinstance(value, str):
        return _text(value, longest)
    if value is None or isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and abs(value) < _LIMIT:
        return value
    raise ValueError
