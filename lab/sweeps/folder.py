"""The files of a sweep in a folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...reports.files import FULL, as_text, replace_file, typed_path, writable


def host() -> str:
    """Name of this machine, reduced to letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in platform.node())[:40] or "host"


class Folder:
    """Files by name below a folder. A file appears complete or not at all.

    ``field`` is the input that names the folder, for messages about writing.
    """

    def __init__(self, path: str | Path, field: str = "out"):
        self.field = field
        self.path = typed_path(path, "folder").resolve()
        self._made: list[Path] = []
        self._in_use = False  # whether there were files in it when it was last used

        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"folder: {str(self.path)[:200]} is a file; give a folder.")

    def sizes(self, inside: str = "") -> dict[str, int]:
        """Bytes of the files directly inside a folder, by name and sorted; {} if it does not exist.

        Unfinished files, whose names begin with a dot, are left out.
        """
        place = self.path / inside
        if not place.is_dir():
            return {}

        files = (file for file in sorted(place.iterdir()) if file.is_file() and not file.name.startswith("."))
        return {file.name: file.stat().st_size for file in files}

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is none."""
        try:
            content = (self.path / name).read_bytes()
            self._in_use = True
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as e:
            raise UserError(
                f"folder: {name[:200]} in {self.path} cannot be read ({first_line(e)}); make the file readable and run "
                "again."
            ) from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """An object in a JSON file; None if there is no such file.

        Raises:
            UserError: it holds something else.
        """
        data = self.read(name)
        if data is None:
            return None

        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None

        if not isinstance(found, dict):
            raise self.damaged(name)

        return found

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an object as a JSON file."""
        self.write(name, as_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n"))

    def damaged(self, name: str) -> UserError:
        """The error for a file that is missing or damaged."""
        return UserError(
            f"folder: {name} in {self.path} is missing or damaged; delete the file if it is there, and run again."
        )

    def write(self, name: str, data: bytes) -> None:
        """Write a file, unless it has this content already."""
        with suppress(UserError):
            if self.read(name) == data:
                return

        self._expect_still_there()
        try:
            replace_file(self.path / name, data)
            self._in_use = True
        except OSError as e:
            remedy = "delete files there" if e.errno in FULL else "make it writable"
            kept = "; what is finished is kept" if self._in_use else ""
            raise UserError(
                f"{self.field}: {self.path} cannot be written to ({e.strerror or first_line(e)}); {remedy} and run "
                f"again{kept}."
            ) from None

    def check(self, field: str) -> None:
        """Make the folder, write a file of a megabyte to it and remove that; a UserError if that is not possible.

        The folder stays until :meth:`remove_made`: another process that starts at the same time may use it already.
        """
        self._expect_still_there()
        with suppress(OSError):  # which writable() reports
            self._in_use = self.path.is_dir() and any(self.path.iterdir())
            self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
            self.path.mkdir(parents=True, exist_ok=True)

        writable(self.path, field)

    def _expect_still_there(self) -> None:
        """Check that a folder that is in use was not moved: it would be made anew, without what is finished.

        Raises:
            UserError: it is gone.
        """
        if self._in_use and not self.path.is_dir():
            raise UserError(
                f"{self.field}: {self.path} was moved or removed while the sweep ran; move the folder back and run "
                "again."
            )

    def remove_made(self) -> None:
        """Remove the folders that :meth:`check` made, as far as they hold nothing."""
        for place in self._made:  # inner ones first
            with suppress(OSError):
                place.rmdir()

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.path / name).unlink(missing_ok=True)
