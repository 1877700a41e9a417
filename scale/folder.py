"""The files of a sweep: a local folder, or any address that fsspec opens (s3://..., gs://..., memory://...)."""

from __future__ import annotations

import errno
import os
import platform
import posixpath
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError, first_line

# Between a file's name and the mark of the process that writes it.
PART = ".part-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def host() -> str:
    """Name of this machine, reduced to letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in platform.node())[:40] or "host"


def writer() -> str:
    """Mark of the thread that writes a file: unique among all writers of a folder."""
    return f"{os.getpid()}-{threading.get_ident()}-{host()}"


class Folder:
    """Files by name below an address. A file appears complete or not at all.

    Args:
        address: a local path, or an fsspec address.

    Raises:
        UserError: the address needs a package that is not installed, or is a file.
    """

    def __init__(self, address: str | Path):
        self.address = str(address)
        self.local = "://" not in self.address
        self._fs: Any = None
        if self.local:
            self.root = str(Path(self.address).expanduser())
            if Path(self.root).exists() and not Path(self.root).is_dir():
                raise UserError(f"folder: {self.address} is a file; name a folder.")
            return
        try:
            import fsspec

            self._fs, self.root = fsspec.core.url_to_fs(self.address)
        except ImportError as e:
            raise UserError(f"folder: {self.address} needs another package ({first_line(e)}).") from None
        except (ValueError, OSError) as e:
            raise UserError(f"folder: {self.address} cannot be opened ({first_line(e)}); name a folder.") from None

    def _path(self, name: str) -> str:
        return posixpath.join(self.root, name)

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is none."""
        try:
            if self.local:
                return Path(self._path(name)).read_bytes()
            return self._fs.cat_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return os.path.getsize(self._path(name)) if self.local else int(self._fs.size(self._path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Contents of files by name, without those that do not exist; from an address many at a time."""
        if self.local:
            return {name: data for name in names if (data := self.read(name)) is not None}
        paths = {self._path(name): name for name in names}
        found = self._fs.cat(list(paths), on_error="omit") if paths else {}
        return {paths[path]: data for path, data in found.items()}

    def sizes(self, inside: str) -> dict[str, int]:
        """Bytes of the files directly inside a folder, by name; {} if it does not exist."""
        try:
            if self.local:
                with os.scandir(self._path(inside)) as files:
                    return {file.name: file.stat().st_size for file in files if file.is_file()}
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path(inside), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {posixpath.basename(f["name"]): int(f["size"]) for f in found if f["type"] == "file"}

    def names(self, inside: str = "") -> list[str]:
        """Names of the files and folders directly inside a folder, sorted; [] if it does not exist. Unfinished files are left out."""
        try:
            if self.local:
                found = os.listdir(self._path(inside))
            else:
                self._fs.invalidate_cache()
                found = [posixpath.basename(p.rstrip("/")) for p in self._fs.ls(self._path(inside), detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if PART not in name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name and rename it.

        Raises:
            UserError: the disk is full.
        """
        path = self._path(name)
        part = f"{path}{PART}{writer()}"
        try:
            if self.local:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(part, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            else:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
        except OSError as e:
            self.remove_path(part)
            if isinstance(e, FileNotFoundError) and self.size(name) == len(data):
                return  # another writer finished the same file and removed what seemed left behind
            if e.errno in _FULL:
                raise UserError(
                    f"out: there is no space left for {self.address}; free some and run the same command again, which goes on where "
                    "this one stopped."
                ) from None
            raise
        except BaseException:  # an interruption between two writes leaves no file behind
            self.remove_path(part)
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file to be written in parts; it is renamed at the end, or removed after an error."""
        path = self._path(name)
        part = f"{path}{PART}{writer()}"
        if self.local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        else:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            with open(part, "wb") if self.local else self._fs.open(part, "wb") as file:
                yield file
            if self.local:
                os.replace(part, path)
            else:
                self._fs.mv(part, path)
        except BaseException:
            self.remove_path(part)
            raise

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file that must not exist yet; whether it was created. Object stores may let two writers succeed."""
        path = self._path(name)
        try:
            if self.local:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    file.write(data)
            else:
                if self._fs.exists(path):
                    return False
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                self._fs.pipe_file(path, data)
            return True
        except FileExistsError:
            return False

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        self.remove_path(self._path(name))

    def remove_path(self, path: str) -> None:
        """Remove a file by its whole path, if it exists."""
        try:
            os.remove(path) if self.local else self._fs.rm_file(path)
        except FileNotFoundError:
            pass

    def remove_parts(self, name: str) -> None:
        """Remove what interrupted writers left behind of the files whose names begin so. Such files are never read."""
        if self.local:
            folder, start = os.path.split(self._path(name))
            for found in os.listdir(folder):
                if found.startswith(start) and PART in found:
                    self.remove_path(os.path.join(folder, found))
