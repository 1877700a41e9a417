"""Digests of downloaded files, recorded at the first download and checked from then on.

Beside ``NAME`` a file ``NAME.sha256`` holds one line in the format of ``sha256sum``, which can verify it too. Hashing 12 GB
takes half a minute, so a file is hashed again only after it changed, which its modification time shows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError

_CHUNK = 1 << 22


def digests(path: Path, tick: Callable[[], None] = lambda: None) -> tuple[str, str, str]:
    """sha256, SHA-1 and git hash (SHA-1 of a blob) of a file; ``tick`` is called every 4 MB."""
    sha1 = hashlib.sha1(usedforsecurity=False)
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for digest in (sha256, sha1, git):
                digest.update(chunk)
            tick()
    return sha256.hexdigest(), sha1.hexdigest(), git.hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def recorded(path: Path) -> str | None:
    """The sha256 recorded for a file, or None."""
    try:
        with _beside(path).open("rb") as file:
            found = re.match(rb"([0-9a-f]{64})\b", file.read(200))
    except OSError:
        return None
    return found[1].decode() if found else None


def record(path: Path, sha256: str) -> None:
    """Record the sha256 of a file.

    Raises:
        OSError: it cannot be written.
    """
    whole, part = _beside(path), path.with_name(f".{path.name}.sha256.part")
    part.write_text(f"{sha256}  {path.name}\n", encoding="utf-8")
    os.replace(part, whole)


def check(path: Path, pinned: str | None, field: str, tick: Callable[[], None] = lambda: None) -> None:
    """Check a downloaded file that changed since its digest was recorded, or one with a pinned digest and no record.

    Args:
        pinned: sha256 of the catalogue, or None.
        field: name of the input, for messages.

    Raises:
        UserError: the digest differs.
    """
    first = recorded(path)
    expected = pinned or first
    try:
        if expected is None or first == expected and path.stat().st_mtime <= _beside(path).stat().st_mtime:
            return
        found = digests(path, tick)[0]
        if found == expected:
            record(path, found)
            return
    except OSError:  # a read-only folder
        return
    by = "FastAR's catalogue" if pinned else f"{path.name}.sha256"
    raise UserError(
        f"{field}: {path.name} has the sha256 {found[:16]}..., and {by} states {expected[:16]}...; delete the file to "
        f"download it again{'' if pinned else f', or {path.name}.sha256 to accept it'}"
    )
