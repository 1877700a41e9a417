"""A dataclass from JSON: what fits comes back, and the first value that does not is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from fastar_nodes.reports.reading import MOST_ENTRIES, NOT_READ, read, within


@dataclass(frozen=True)
class Record:
    """A field of every kind."""

    name: str
    count: int = field(metadata=within(1, 9))
    settings: Mapping[str, Any]
    parent: str | None = None
    seconds: float = 0.0
    whole: bool = False
    sizes: tuple[int, int] = field(default=(1, 2), metadata=within(1))
    words: tuple[str, ...] = ()
    sums: dict[str, float] = field(default_factory=dict)
    made_here: object = field(default=None, metadata=NOT_READ)


GOOD = {
    **{"name": "a", "count": 9, "settings": {"a": -1.5, "b": "x", "c": None, "d": True, "e": -(1 << 63)}},
    **{"parent": "b", "seconds": 3, "whole": True, "sizes": [4, 5], "words": ["x"], "sums": {"s": 0.5}},
}


def test_what_fits_comes_back():
    found = read(Record, {**GOOD, "made_here": "stranger", "more": 1})
    assert asdict(found) == {**GOOD, "sizes": (4, 5), "words": ("x",), "made_here": None}
    least = {name: GOOD[name] for name in ("name", "count", "settings")}
    assert read(Record, least) == read(Record, {**least, "parent": None, "seconds": None, "sums": None})


def test_texts_are_cut():
    found = read(Record, {**GOOD, "name": "abc", "words": ["abcd"], "settings": {"abcd": "abcd"}}, longest=2)
    assert (found.name, found.words, found.settings) == ("ab", ("ab",), {"ab": "ab"})


@pytest.mark.parametrize(("name", "value"), [
    *(("name", value) for value in (None, 3, ["a"], {})),
    *(("count", value) for value in (None, "1", 1.0, True, 0, 10, -1, 1 << 70)),
    *(("settings", value) for value in (None, [], {"a": []}, {"a": {}}, {"a": float("inf")}, {"a": 1 << 70}, {3: 1})),
    *(("parent", value) for value in (3, [])),
    *(("seconds", value) for value in ("1", True, -1, float("nan"), float("inf"), 1 << 64)),
    *(("whole", value) for value in (1, "true", [])),
    *(("sizes", value) for value in ([1], [1, 2, 3], [0, 1], [1.0, 2.0], "12", {"a": 1})),
    *(("words", value) for value in ("ab", [3], [None], ["a"] * (MOST_ENTRIES + 1))),
    *(("sums", value) for value in ([], {"a": "b"}, {"a": None}, {"a": -1.0})),
])  # fmt: skip
def test_a_value_that_does_not_fit_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}$"):
        read(Record, {**GOOD, name: value})


@pytest.mark.parametrize("found", [None, [], 3, "name"])
def test_what_is_no_object_is_refused(found):
    with pytest.raises(ValueError, match="^record$"):
        read(Record, found)
