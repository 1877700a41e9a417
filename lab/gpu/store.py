"""The results of a part in a file, which is written after every measurement: what was cut goes on later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...reports.files import as_text, replace_file
from .cases import Case

BEGAN = "began"
DONE = "done"
PROBLEM = "problem"
# Exit codes of the process that measures: the device is broken; nothing moved for too long.
BROKEN, STUCK = 3, 4


def machine_of(folder: Path) -> dict[str, Any]:
    """What is known of the machine that measured; {} before the first run."""
    file = folder / "machine.json"
    return json.loads(file.read_text(encoding="utf-8-sig")) if file.exists() else {}


def write_machine(folder: Path, **about: Any) -> None:
    """Add to what is known of the machine."""
    text = json.dumps({**machine_of(folder), **about}, indent=1) + "\n"
    replace_file(folder / "machine.json", as_text(text))


class PartFile:
    """The rows of a part, by their place among its cases.

    A row has what is the same for every speed, and ``measured``, by the name of a measurement. A measurement that began
    and has neither ended nor failed was cut, and is made again.
    """

    def __init__(self, folder: Path, part: str):
        self.path = folder / "parts" / f"{part}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.rows = json.loads(self.path.read_text(encoding="utf-8-sig"))

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, as_text(json.dumps(self.rows, indent=1) + "\n"))

    def row(self, i: int, case: Case) -> dict[str, Any]:
        """The row of a case."""
        about = {"name": case.name, "batch": case.batch, "command": case.command, "measured": {}}
        return self.rows.setdefault(str(i), about)

    def reference(self, i: int) -> Path:
        """The file of a case's plain image."""
        return self.path.with_name(f"{self.path.stem}-{i}.npy")

    def measurements(self) -> Iterator[dict[str, Any]]:
        for row in self.rows.values():
            yield from row["measured"].values()

    def end_begun(self, why: str) -> bool:
        """Say of what began and did not end why the process has ended; "" if it was cut and is to be made again.

        Returns whether there was any.
        """
        begun = [found for found in self.measurements() if found.pop(BEGAN, False)]
        if why:
            for found in begun:
                found[PROBLEM] = why
        if begun:
            self.save()
        return bool(begun)


def missing(row: dict[str, Any], name: str) -> bool:
    """Whether a measurement is to be made: it was not, or it was cut."""
    found = row["measured"].get(name)
    return found is None or not (found.get(DONE) or found.get(PROBLEM))
