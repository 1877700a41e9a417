"""Settings of the samplers: frozen dataclasses from whose fields widgets, command-line options and range checks are derived."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ..errors import UserError

S = TypeVar("S")


@dataclass(frozen=True)
class Knob:
    """Metadata of one setting."""

    help: str  # what it is, the effect of a higher value, a usual value, the value at which the method is exact
    # low, high, step: range (inclusive) and widget step; None for choices and switches
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()  # allowed strings, or empty
    paper: float | None = None  # the paper's value, which nodes show, where the default stands for the model's own
    symbol: str = ""  # the paper's symbol, or ""
    unit: str = ""  # unit, or ""
    advanced: bool = False  # hidden among the advanced widgets


class Claims:
    """What settings promise about the pictures; every part of a combination adds its own condition."""

    def exact(self, side: int) -> bool:
        """Whether the pictures are the plain sampler's, up to rounding in fp32. ``side``: of the token grid."""
        return True

    def lossless(self) -> bool:
        """Whether the pictures are others than the plain sampler's, with exactly the same distribution."""
        return False


def knob(default: Any, help: str, **about: Any) -> Any:
    """A dataclass field with its :class:`Knob`."""
    return field(default=default, metadata={"knob": Knob(help, **about)})


def knobs(settings: type | object) -> dict[str, tuple[Any, Knob]]:
    """Field name to (default, knob), in field order."""
    return {f.name: (f.default, f.metadata["knob"]) for f in fields(settings)}  # type: ignore[arg-type]


def named(kind: type, values: Mapping[str, Any]) -> str:
    """Values in words, "32 AR steps, cfg 2.0": of the main settings, and of others that are not at their defaults."""
    words = []
    for name, (default, about) in knobs(kind).items():
        if name in values and (not about.advanced or values[name] != default):
            value = f"{values[name]:.3g}" if isinstance(values[name], float) else f"{values[name]}"
            word = name.replace("ar_", "AR_").replace("_", " ")
            words.append(f"{value} {word}" if word.endswith(" steps") else f"{word} {value}")
    return ", ".join(words)


def make(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings of ``kind`` from names and values (numbers, or text from a command line).

    Raises:
        UserError: an unknown name, a wrong type, a number outside its range or not finite, an unknown choice.
    """
    known = knobs(kind)
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{name}: no such setting; there are {', '.join(known)}.")
        clean[name] = _clean(name, value, *known[name])
    return kind(**clean)


def _clean(name: str, value: Any, default: Any, about: Knob) -> Any:
    if about.choices:
        if value not in about.choices:
            raise UserError(f"{name}: {value!r} is not one of {', '.join(about.choices)}.")
        return value
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return str(value).lower() in ("true", "yes", "on", "1")
        raise UserError(f"{name}: {value!r} is neither true nor false.")
    try:
        number = float(value)
        whole = int(number) if math.isfinite(number) else 0
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name}: {value!r} is not a number.") from None
    if not math.isfinite(number):
        raise UserError(f"{name}: {value!r} is not a finite number.")
    if isinstance(default, int):
        if number != whole:
            raise UserError(f"{name}: {value!r} is not a whole number.")
        number = whole
    low, high = about.low, about.high
    if low is not None and number < low or high is not None and number > high:
        raise UserError(f"{name}: {number:g} is outside {low:g} to {high:g}.")
    return number
