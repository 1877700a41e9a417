"""What is known of a file by the catalogue: published files need no remark on what they do not state."""

from __future__ import annotations

from pathlib import Path

from . import hub


def entry_of(path: Path, family: str) -> str:
    """The id of the catalogue entry whose name a file has; "" for other files.

    ``family`` is a key of :data:`.kinds.KINDS`.
    """
    for entry in hub.entries(family):
        if f"/{path.as_posix()}".endswith(f"/{entry.file}"):
            return entry.id

    return ""


def is_published(path: Path, family: str) -> bool:
    """Whether a file has the name of a catalogue entry of its family."""
    return bool(entry_of(path, family))
