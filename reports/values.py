"""Values of a sweep's axis, written as text: "0.8, 0.95, 0.99", "4..8", "0.8..1 x 5", "exact, balanced, fast"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from ..errors import UserError

MOST_VALUES = 256
_MOST_TEXT = 4096
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)"
_RANGE = re.compile(rf"{_NUMBER}\s*\.\.\s*{_NUMBER}(?:\s*x\s*(\d{{1,9}}))?", re.IGNORECASE)


def parse_values(text: str, field: str, whole: bool = False) -> tuple[str, ...]:
    """The values of an axis in the order written, without repetitions.

    Args:
        text: values separated by commas or lines. ``a..b x n`` are n evenly spaced numbers from a to b, both included;
            ``a..b`` are whole numbers in steps of 1. b may be below a. Other words are taken as they are.
        field: name of the input, for messages.
        whole: whether evenly spaced numbers are rounded to whole ones.

    Returns:
        At least one value; numbers of a range in their shortest form with at most 6 decimals.

    Raises:
        UserError: no value, more than 256, or a range that is not one.
    """
    out: list[str] = []
    for part in _parts(text, field, ",;"):
        out += _range(part, field, whole) if ".." in part else [part]

    return _distinct(out, field, "write values such as 0.8, 0.95 or 0.8..1 x 5")


def parse_texts(text: str, field: str, separators: str) -> tuple[str, ...]:
    """The values of an axis that are names or prompts, in the order written, without repetitions.

    ``separators``: characters between two values, beside lines. Raises UserError: as :func:`parse_values`.
    """
    return _distinct(_parts(text, field, separators), field, f"write values with {separators} between them")


def _parts(text: str, field: str, separators: str) -> list[str]:
    """The parts of a text between separators or lines, without empty ones."""
    if len(text) > _MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {_MOST_TEXT}.")

    parts = [part.strip() for part in re.split(f"[{re.escape(separators)}\n]", text)]
    return list(filter(None, parts))


def _distinct(values: Iterable[str], field: str, remedy: str) -> tuple[str, ...]:
    """Values without repetitions; a UserError if there are none, or too many."""
    out = tuple(dict.fromkeys(values))
    if not out:
        raise UserError(f"{field}: it is empty; {remedy}.")
    if len(out) > MOST_VALUES:
        raise UserError(f"{field}: there are more than {MOST_VALUES} values; give fewer.")

    return out


def _range(part: str, field: str, whole: bool) -> list[str]:
    """The numbers of ``a..b`` or ``a..b x n``."""
    match = _RANGE.fullmatch(part)
    if match is None or max(abs(Decimal(match[1])), abs(Decimal(match[2]))) > 10**12:
        raise UserError(
            f"{field}: {part[:60]!r} is not a range; write, for example, 1..4 for 1, 2, 3 and 4, or 1..4 x 7 for seven "
            "values from 1 to 4. Both ends of a range must lie between -10^12 and 10^12."
        )

    low = Decimal(match[1])
    high = Decimal(match[2])
    if match[3] is None and (low % 1 or high % 1):
        raise UserError(
            f"{field}: {part[:60]!r} must say how many values you want, because an end of the range is not a whole "
            f"number; for five values, write {low}..{high} x 5."
        )

    count = int(abs(high - low)) + 1 if match[3] is None else int(match[3])
    if not 1 <= count <= MOST_VALUES or count == 1 and low != high:
        raise UserError(f"{field}: the number of values in {part[:60]!r} is {count}; ask for 2 to {MOST_VALUES}.")

    steps = max(1, count - 1)
    return [_short(low + (high - low) * i / steps, whole) for i in range(count)]


def _short(number: Decimal, whole: bool) -> str:
    """A number's shortest form: at most 6 decimals, or none."""
    if whole:
        rounded = number.to_integral_value()
    else:
        rounded = number.quantize(Decimal("0.000001")).normalize()

    return "0" if rounded == 0 else f"{rounded:f}"
