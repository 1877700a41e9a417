"""Catalogue of weight files: the built-in demo, local files, and entries that can be downloaded.

A *choice* is the selected menu text: an entry's id ("mar-base", with or without "(download ...)"), or a file name relative to one of the
model folders. Saved graphs contain choices, so every text a menu ever showed must resolve, before and after the download.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import UserError
from .download import Missing, download, readable_size
from .families import KINDS

_PACKAGE = Path(__file__).resolve().parents[1]
# The decoder of LlamaGen's text-to-image models, and the TA-Tok of files that name none.
_TEXT_DECODER, _TA_TOK = "vq16-t2i", "ta-tok"
# Suffix of parts that are missing in some repositories.
_OPTIONAL = "?"
_DOWNLOAD_SUFFIX = re.compile(r" \(download[^()]*\)$")
# Files of a Hugging Face folder: its weights, or a shard of them.
_WEIGHTS = re.compile(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$")

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Entry:
    """One catalogue entry; ``catalogue.json`` documents the fields."""

    id: str
    family: str
    file: str
    repo: str | None
    revision: str | None
    size: int | None
    sha256: str | None
    licence: str
    decoder: str | None
    parts: Sequence[str] = ()
    draft: str | None = None
    note: str = ""

    @property
    def built_in(self) -> bool:
        """Whether the file is part of the package."""
        return self.repo is None

    @property
    def missing(self) -> bool:
        """Whether the file should be part of the package but does not exist."""
        return self.built_in and not os.path.isfile(_PACKAGE / self.file)

    @property
    def names(self) -> dict[str, bool]:
        """Paths of the files below a model folder, and whether the repository may lack them."""
        parts = {f"{self.file}/{part.removesuffix(_OPTIONAL)}": part.endswith(_OPTIONAL) for part in self.parts}
        return parts or {self.file: False}

    @property
    def label(self) -> str:
        """Menu text while the file is not downloaded."""
        size = f" {readable_size(self.size)}" if self.size else ""
        pinned = "" if self.sha256 else ", not pinned"
        return f"{self.id} (download{size}{f', {self.note}' if self.note else ''}{pinned})"

    def find(self, folders: Sequence[Path]) -> Path | None:
        """The file, which may lie in a subfolder of a model folder, or the folder of several files; None if it is not there."""
        for folder in folders:
            if self.parts and all(optional or (folder / name).is_file() for name, optional in self.names.items()):
                return folder / self.file
            files = [] if self.parts else [path for path in folder.rglob(self.file) if path.is_file()]
            if files:
                return min(files, key=lambda path: (len(path.parts), path))
        return None


@lru_cache(maxsize=1)
def _catalogue() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return tuple(Entry(**fields) for fields in json.loads(text)["entries"])


def entries(family: str) -> list[Entry]:
    """Catalogue entries of a family (a key of :data:`.families.KINDS`), built-in entries first."""
    return sorted((e for e in _catalogue() if e.family == family), key=lambda e: not e.built_in)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """Menu of a loader: existing built-in entries, local files (relative to the model folders), then downloadable entries."""
    catalogued = entries(family)
    others = {PurePosixPath(e.file).parts[0] for e in _catalogue() if e.family != family and not e.built_in}
    # Files catalogued for another loader are left out.
    names = [name for name in local if not others & set(PureWindowsPath(name).parts)]
    existing = [f"/{PureWindowsPath(name).as_posix()}" for name in names]
    missing = [e.label for e in catalogued if not e.built_in and not any(f"/{e.file}/" in f"{n}/" for n in existing)]
    if KINDS[family].folder:
        names = list(dict.fromkeys(_WEIGHTS.sub("", name) for name in names))
    return [e.id for e in catalogued if e.built_in and not e.missing] + names + missing


def resolve(choice: str, family: str, folders: Sequence[Path], download_to: Path, progress: Progress = None) -> Path:
    """The file or folder of a choice, downloaded if necessary.

    Args:
        choice: see the module's documentation.
        family: a key of :data:`.families.KINDS`.
        folders: model folders to search.
        download_to: folder for downloads; created if necessary.
        progress: called with (bytes received, total bytes or 0) after every chunk of a download. An exception from it cancels the
            download; the next call resumes it.

    Raises:
        UserError: no such file, a name outside the folders, or a failed download.
    """
    field, folders = KINDS[family].field, [*map(Path, folders)]
    entry = _entry(choice, family)
    if entry is None:
        return _local(choice, folders, field, KINDS[family].folder)
    if entry.built_in:
        if entry.missing:
            raise UserError(f"{field}: the built-in {entry.id} is missing from this installation; install FastAR again")
        return _PACKAGE / entry.file
    return entry.find([*folders, Path(download_to)]) or _fetch(entry, Path(download_to), field, progress)


def absent(choice: str, family: str, folders: Sequence[Path]) -> Entry | None:
    """The catalogue entry that :func:`resolve` would download for a choice; None for built-in entries and files that are here."""
    entry = _entry(choice, family)
    return None if entry is None or entry.built_in or entry.find([*map(Path, folders)]) else entry


def decoder_for(choice: str, family: str, stated: str | None = None, text: bool = False) -> str:
    """The id of the decoder that "auto" selects for a model: that of its catalogue entry (chosen by id or file), or stated in the file's
    metadata, or the official one; LlamaGen's text-to-image models (``text``) have their own."""
    official, file = KINDS[family].decoder, f"/{PureWindowsPath(choice).as_posix()}"
    same = (e for e in entries(family) if not e.built_in and file.endswith(f"/{e.file}"))
    entry = _entry(choice, family) or next(same, None)
    if entry and entry.decoder:
        return entry.decoder
    kind = next(e.family for e in _catalogue() if e.id == official)
    if stated in [e.id for e in entries(kind)]:
        return str(stated)
    return _TEXT_DECODER if text else official


def ta_tok_for(stated: str | None) -> str:
    """The id of the TA-Tok that "auto" selects for a de-tokenizer: the one in the file's metadata, else the official one."""
    return str(stated) if stated in [e.id for e in entries("ta-tok")] else _TA_TOK


def draft_for(choice: str) -> str | None:
    """The id of an entry's default draft model, or None; files have none."""
    return next((e.draft for e in _catalogue() if e.id == _id(choice)), None)


def _id(choice: str) -> str:
    return _DOWNLOAD_SUFFIX.sub("", choice.strip())


def _entry(choice: str, family: str) -> Entry | None:
    """The catalogue entry of a choice, None for a file; a UserError if it is no text, or the entry of another family."""
    if not isinstance(choice, str):
        found = type(choice).__name__
        raise UserError(f"{KINDS[family].field}: it got a {found}, not a name; choose one from the list")
    entry = next((e for e in _catalogue() if e.id == _id(choice)), None)
    if entry and entry.family != family:
        field, kind = KINDS[family].field, KINDS[entry.family]
        remedy = "choose another from the list" if kind.field == field else f"choose it as {kind.field}"
        raise UserError(f"{field}: {entry.id} is {kind.noun}, not {KINDS[family].noun}; {remedy}")
    return entry


def _fetch(entry: Entry, download_to: Path, field: str, progress: Progress) -> Path:
    """Download the missing files of an entry; returns its file, or the folder of several."""
    done = 0

    def report(received: int, total: int) -> None:
        if progress is not None:
            progress(done + received, (entry.size or 0) if entry.parts else total)

    for name, optional in entry.names.items():
        path = download_to / name
        if not path.is_file():
            try:
                download(entry.repo or "", path.name, path.parent, entry.revision, entry.sha256, report, field)
            except Missing:
                if not optional:
                    raise
                continue
        done += path.stat().st_size
    return download_to / entry.file


def _local(choice: str, folders: Sequence[Path], field: str, folder_too: bool = False) -> Path:
    """The local file of a choice, or with ``folder_too`` the folder; a UserError if it is absent, absolute or contains ".."."""
    windows = PureWindowsPath(choice)  # parses both separators, drives and shares on every system
    if not choice.strip() or "\0" in choice or windows.anchor or ".." in windows.parts:
        raise UserError(
            f"{field}: {choice[:80]!a} is not the name of a file in a model folder (nor may it be a full path or "
            "contain '..'); choose one from the list"
        )
    for folder in folders:
        # Graphs saved on Windows contain sub\name, others sub/name.
        for path in (folder / choice, folder.joinpath(*windows.parts)):
            # Links are followed, as in ComfyUI.
            if os.path.isfile(path) or folder_too and windows.parts and os.path.isdir(path):
                return path
    where = " or ".join(map(str, folders)) or "any model folder"
    raise UserError(f"{field}: {choice[:80]!a} is not in {where}; put it there or choose another")
