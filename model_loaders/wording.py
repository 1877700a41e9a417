"""Names and shapes from an untrusted file in messages of bounded length."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor

_NAMES_SHOWN, _ROOM = 10, 200  # names and characters


def list_names(wrong: dict[str, list[str]], expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """For example "1 misshaped (c is 3x4, not 3x5), 12 missing (a, b), 10 of them not named": ten names or 200 characters."""
    kinds = sorted((kind for kind in wrong if wrong[kind]), key=lambda kind: len(wrong[kind]))
    left, room, parts = _NAMES_SHOWN, _ROOM, []
    for i, kind in enumerate(kinds):
        shown = [printable(name) for name in wrong[kind][: left // (len(kinds) - i)]]
        if kind == "misshaped":
            shown = [
                f"{n} is {shape_text(state[k])}, not {shape_text(expected[k])}"
                for n, k in zip(shown, wrong[kind], strict=False)
            ]
        shown = _fitting(shown, room // (len(kinds) - i))
        left, room = left - len(shown), room - sum(map(len, shown))
        parts.append(f"{len(wrong[kind])} {kind} ({', '.join(shown)})")
    hidden = sum(map(len, wrong.values())) - (_NAMES_SHOWN - left)
    return ", ".join(parts) + (f", {hidden} of them not named" if hidden else "")


def some(names: list[str]) -> str:
    """The first names, at most ten or 200 characters, and the number of the others."""
    shown = _fitting([printable(name) for name in names[:_NAMES_SHOWN]], _ROOM)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _fitting(texts: list[str], room: int) -> list[str]:
    """The first texts of at most ``room`` characters together, at least one."""
    used = list(accumulate(map(len, texts)))
    return texts[: max(1, sum(n <= room for n in used))]


def shape_text(tensor: Tensor) -> str:
    """For example "3x4"."""
    return "x".join(map(str, tensor.shape)) or "a single number"


def printable(name: str) -> str:
    """A name or value from a file, printable and at most 80 characters."""
    name = name if name.isprintable() else ascii(name)
    return name if len(name) <= 80 else name[:77] + "..."
