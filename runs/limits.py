"""Limits of what may be asked for, and the check of a whole number, for nodes, command line and Python."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import UserError

SEEDS = 1 << 64  # seeds are 0 to one less
MOST_IMAGES = 1024  # of a run of the command line or of Python


def whole(value: Any, field: str, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, of any type but bool.

    Raises:
        UserError: anything else; ``field`` is the input to change.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None

    if number is None:
        raise UserError(f"{field}: {f'{value!r}'[:60]} is not a whole number.")
    if not low <= number <= high:
        raise UserError(f"{field}: {number} is outside {low} to {high}.")
    return number
