"""The files of a sweep: a local folder, or any address that fsspec opens (s3://..., gs://..., memory://...)."""

from __future__ import annotations

import json
import platform
import posixpath
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...reports.files import FULL, as_text, typed_path, writable

# Between a file's name and the mark of the process that writes it.
PART = ".part-"


def host() -> str:
    """Name of this machine, reduced to letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in platform.node())[:40] or "host"


class Folder:
    """Files by name below an address. A file appears complete or not at all.

    ``field`` is the input that names the address, for messages about writing.
    """

    def __init__(self, address: str | Path, field: str = "out"):
        self.field = field
        self._made: list[Path] = []
        self._in_use = False  # whether there were files in it when it was last used
        self.local = "://" not in str(address)

        path = typed_path(address, "folder") if self.local else address

        try:
            import fsspec

            self.address = str(Path(path).resolve() if self.local else path)
            self._fs: Any
            self._fs, self.root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
            if self._fs.exists(self.root) and not self._fs.isdir(self.root):
                raise NotADirectoryError("it is a file")
        except (ImportError, ValueError, OSError) as e:  # another package is missing, or the storage refuses
            why = first_line(e)
            raise UserError(f"folder: {str(path)[:200]} cannot be opened ({why}); name a folder.") from None

    def _path(self, name: str) -> str:
        """The whole path of a name."""
        return posixpath.join(self.root, name)

    def sizes(self, inside: str = "") -> dict[str, int]:
        """Bytes of the regular files directly inside a folder, by name and sorted; {} if it does not exist.

        Unfinished files are left out.
        """
        try:
            found = self._fs.ls(self._path(inside), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}

        sizes = {}
        for about in found:
            name = posixpath.basename(about["name"])
            if about["type"] == "file" and PART not in name:
                sizes[name] = int(about["size"])

        return dict(sorted(sizes.items()))

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is none."""
        try:
            content: bytes = self._fs.cat_file(self._path(name))
            self._in_use = True
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as e:
            raise UserError(f"folder: {name[:200]} in {self.address} cannot be read ({first_line(e)}).") from None

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
        return UserError(f"folder: {name} in {self.address} is missing or damaged; delete it and run again.")

    def write(self, name: str, data: bytes) -> None:
        """Write a file, unless it has this content already: under a temporary name, which is replaced at the end."""
        with suppress(UserError):
            if self.read(name) == data:
                return

        self._expect_still_there()
        path = self._path(name)
        part = f"{path}{PART}{uuid.uuid4().hex}"

        try:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            with self._fs.open(part, "wb") as file:
                file.write(data)
            self._replace(part, path)
            self._in_use = True
        except OSError as e:
            with suppress(OSError):
                self._discard(part)

            why = e.strerror or first_line(e)
            remedy = "free space there" if e.errno in FULL else "make it writable"
            kept = "; what is finished is kept" if self._in_use else ""
            raise UserError(
                f"{self.field}: {self.address} cannot be written to ({why}); {remedy} and run again{kept}."
            ) from None
        except BaseException:  # an interruption between two writes leaves no file behind
            self._discard(part)
            raise

    def check(self, field: str) -> None:
        """Make the folder, write a file of a megabyte to it and remove that; a UserError if that is not possible.

        The folder stays until :meth:`remove_made`: another process that starts at the same time may use it already.
        """
        self._expect_still_there()
        if self.local:
            root = Path(self.root)
            with suppress(OSError):  # which writable() reports
                self._in_use = root.is_dir() and any(root.iterdir())
                self._made = [place for place in (root, *root.parents) if not place.exists()]
                root.mkdir(parents=True, exist_ok=True)

            writable(root, field)
            return

        name = f"{PART}{uuid.uuid4().hex}"
        try:
            self._fs.makedirs(self.root, exist_ok=True)
            self._fs.pipe_file(self._path(name), b"x")
            self.remove(name)
        except Exception as e:  # of the storage's own client
            raise UserError(f"{field}: {self.address} cannot be written to ({first_line(e)}).") from None

    def _expect_still_there(self) -> None:
        """Check that a local folder that is in use was not moved: it would be made anew, without what is finished.

        Raises:
            UserError: it is gone.
        """
        if self.local and self._in_use and not Path(self.root).is_dir():
            raise UserError(
                f"{self.field}: {self.address} was moved or removed while the sweep ran; move it back and run again."
            )

    def remove_made(self) -> None:
        """Remove the local folders that :meth:`check` made, as far as they hold nothing."""
        for place in self._made:  # inner ones first
            with suppress(OSError):
                place.rmdir()

    def _replace(self, part: str, path: str) -> None:
        """Rename a finished file, and remove what interrupted writers of the same one left behind."""
        try:
            self._fs.mv(part, path)
        except FileNotFoundError:
            if not self._fs.exists(path):
                raise
            return  # another writer of the same file was faster, and removed what seemed to be left behind

        unfinished = f"{posixpath.basename(path)}{PART}"
        for found in self._fs.ls(posixpath.dirname(path), detail=False):
            if posixpath.basename(found).startswith(unfinished):
                self._discard(found)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        self._discard(self._path(name))

    def _discard(self, path: str) -> None:
        """Remove the file at a whole path, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)
