"""Which weight files there are: the built-in demo, a person's own files, and a catalogue that can be downloaded.

A *choice* is the text a person picked: an entry's id ("mar-base", with or without its "(download ...)"), or the name
of a file below one of the model folders. Saved graphs keep choices for years, so every text a menu ever showed goes on
resolving, before and after the download.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from ..errors import UserError
from .checkpoint import read_metadata
from .download import download, readable_size

_PACKAGE = Path(__file__).resolve().parents[1]
# What the input is called that takes a file of this family; messages begin with it.
FIELDS = {"mar": "checkpoint", "kl": "decoder"}
_OFFICIAL_DECODER = "kl16"
_MARK = re.compile(r" \(download[^()]*\)$")


@dataclass(frozen=True)
class Entry:
    """One catalogued file; ``catalogue.json`` explains the fields."""

    id: str
    family: str
    file: str
    repo: str | None
    revision: str | None
    size: int | None
    sha256: str | None
    licence: str
    decoder: str | None

    @property
    def built_in(self) -> bool:
        """Whether the file comes with the package."""
        return self.repo is None

    @property
    def label(self) -> str:
        """What a menu shows while the file is not here."""
        return f"{self.id} (download {readable_size(self.size)})" if self.size else f"{self.id} (download)"


@lru_cache(maxsize=1)
def _catalogue() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return tuple(Entry(**fields) for fields in json.loads(text)["entries"])


def entries(family: str) -> list[Entry]:
    """The catalogue's entries of a family ("mar", "kl"), built-in ones first."""
    return sorted((e for e in _catalogue() if e.family == family), key=lambda e: not e.built_in)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """What a loader offers: built-in entries, local files, then entries that are not among them, with their size.

    Args:
        local: file names relative to the model folders, as ComfyUI lists them.
    """
    known, here = entries(family), {_base(name) for name in local}
    missing = [e.label for e in known if not e.built_in and e.file not in here]
    return [e.id for e in known if e.built_in] + list(local) + missing


def check(choice: str, family: str, local: Sequence[str]) -> None:
    """Nothing if ``choice`` is, or ever was, on the :func:`menu`.

    For hosts that compare a saved choice with today's menu: "mar-base (download 832 MB)" leaves the menu with the
    download, yet stays valid.

    Raises:
        UserError: it never was.
    """
    if choice not in local and _entry(choice, family) is None:
        raise UserError(f"{FIELDS[family]}: {_quoted(choice)} is none of the files here; choose another from the list")


def resolve(
    choice: str, family: str, folders: Sequence[Path], download_to: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:  # fmt: skip
    """The file behind a choice, downloaded if it has to be.

    Args:
        choice: see the top of this module.
        family: "mar" or "kl".
        folders: model folders that may hold it.
        download_to: where a download goes; made when needed.
        progress: called in this thread with (bytes so far, bytes in all or 0) some times a second while downloading.
            What it raises ends the download; the next one goes on from there.

    Raises:
        UserError: no such file, a name that leads out of the folders, or a download that failed.
    """
    field, folders = FIELDS[family], [*map(Path, folders)]
    entry = _entry(choice, family)
    if entry is None:
        return _local(choice, folders, field)
    if entry.built_in:
        path = _PACKAGE / entry.file
        if not os.path.isfile(path):
            raise UserError(f"{field}: the built-in {entry.id} is missing from this installation; install FastAR again")
        return path
    found = _find(entry.file, [*folders, Path(download_to)])
    return found or download(
        entry.repo or "", entry.file, Path(download_to), revision=entry.revision, size=entry.size, sha256=entry.sha256,
        progress=progress, field=field,
    )  # fmt: skip


def decoder_for(choice: str, path: Path | None = None) -> str:
    """The decoder entry (an id) that "auto" means for a MAR.

    In this order: what the catalogue says of the entry, what the file's metadata says, what the catalogue says of a
    file of that name, and else the official KL-16, which every published MAR uses.

    Args:
        choice: what was chosen as checkpoint.
        path: the file it resolved to, whose metadata may name a decoder.
    """
    decoders = {e.id for e in entries("kl")}
    entry = _entry(choice, "mar")
    if entry and entry.decoder:
        return entry.decoder
    named = read_metadata(path).get("decoder") if path else None
    if named in decoders:
        return str(named)
    name = path.name if path else _base(choice)
    same = next((e for e in entries("mar") if _base(e.file) == name and not e.built_in), None)
    return same.decoder if same and same.decoder else _OFFICIAL_DECODER


def _entry(choice: str, family: str) -> Entry | None:
    """The entry a choice names, if any.

    Raises:
        UserError: it names an entry of another family.
    """
    name = _MARK.sub("", choice.strip())
    entry = next((e for e in _catalogue() if e.id == name), None)
    if entry and entry.family != family:
        place = FIELDS.get(entry.family, entry.family)
        raise UserError(f"{FIELDS[family]}: {name} is a {place}; choose it as {place}")
    return entry


def _local(choice: str, folders: Sequence[Path], field: str) -> Path:
    """The file of that name below one of the folders.

    Raises:
        UserError: there is none, or the name leads out of them.
    """
    windows = PureWindowsPath(choice)  # sees both kinds of separator, drives and shares on every system
    if not choice.strip() or "\0" in choice or windows.anchor or ".." in windows.parts:
        raise UserError(
            f"{field}: {_quoted(choice)} is not the name of a file in a model folder (nor may it be a full path or "
            "contain '..'); choose one from the list"
        )
    for folder in folders:
        # A graph saved on Windows writes sub\name, one saved elsewhere sub/name.
        for path in (folder / choice, folder.joinpath(*windows.parts)):
            # Links are followed, as ComfyUI does: whoever may place one may place the file.
            if os.path.isfile(path):
                return path
    where = " or ".join(map(str, folders)) or "any model folder"
    raise UserError(f"{field}: {_quoted(choice)} is not in {where}; put it there or choose another")


def _find(file: str, folders: Sequence[Path]) -> Path | None:
    """A catalogued file in one of the folders or below."""
    for folder in folders:
        if os.path.isfile(folder / file):
            return folder / file
    for folder in folders:
        for path in sorted(folder.rglob(file)) if folder.is_dir() else ():
            if path.is_file():
                return path
    return None


def _base(name: str) -> str:
    return PureWindowsPath(name).name


def _quoted(choice: str) -> str:
    return ascii(choice[:77] + "..." if len(choice) > 80 else choice)
