"""Catalogue of weight files: the built-in demo, local files, and entries that can be downloaded.

A *choice* is the selected menu text: an entry's id ("mar-base", with or without "(download ...)"), or a file name relative to
one of the model folders. Saved graphs contain choices, so every text a menu ever showed must resolve, before and after the
download. A text encoder ("t5") and a language model ("tar") may be a folder or a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import UserError
from .checkpoint import read_metadata
from .download import Missing, check_digest, download, readable_size
from .families import KINDS

_PACKAGE = Path(__file__).resolve().parents[1]
# Family to the family of its decoders, and the default decoder.
_DECODERS = {
    "mar": ("kl", "kl16"),
    "hybrid": ("kl", "kl16"),
    "llamagen": ("vq", "vq16-c2i"),
    "dtok": ("vq", "vq16-t2i"),
}
_TEXT_DECODER = "vq16-t2i"
_TA_TOK = "ta-tok"
# Suffix of parts that are missing in some repositories.
_OPTIONAL = "?"
_DOWNLOAD_SUFFIX = re.compile(r" \(download[^()]*\)$")


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
    def folder(self) -> str:
        """Folder of the files below a model folder."""
        return self.file if self.parts else str(PurePosixPath(self.file).parent)

    @property
    def names(self) -> list[tuple[str, bool]]:
        """Names of the files in :attr:`folder`, and whether the repository may lack them."""
        parts = self.parts or [PurePosixPath(self.file).name]
        return [(part.removesuffix(_OPTIONAL), part.endswith(_OPTIONAL)) for part in parts]

    @property
    def label(self) -> str:
        """Menu text while the file is not downloaded."""
        size = f" {readable_size(self.size)}" if self.size else ""
        pinned = "" if self.sha256 else ", not pinned"
        return f"{self.id} (download{size}{f', {self.note}' if self.note else ''}{pinned})"


@lru_cache(maxsize=1)
def _catalogue() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return tuple(Entry(**fields) for fields in json.loads(text)["entries"])


def entries(family: str) -> list[Entry]:
    """Catalogue entries of a family (a key of :data:`.families.KINDS`), built-in entries first."""
    return sorted((e for e in _catalogue() if e.family == family), key=lambda e: not e.built_in)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """Menu of a loader: existing built-in entries, local files, then downloadable entries with their size.

    Args:
        family: a key of :data:`.families.KINDS`.
        local: file names relative to the model folders, as ComfyUI lists them.
    """
    catalogued = entries(family)
    others = {PurePosixPath(e.file).parts[0] for e in _catalogue() if e.family != family and not e.built_in}
    # Files catalogued for another loader are left out.
    names = [name for name in local if not others & set(PureWindowsPath(name).parts)]
    if KINDS[family].folder:
        names = list(dict.fromkeys(_without_shard(name) for name in names))
    existing = [f"/{PureWindowsPath(name).as_posix()}" for name in names]
    missing = [e.label for e in catalogued if not e.built_in and not any(n.endswith(f"/{e.file}") for n in existing)]
    return [e.id for e in catalogued if e.built_in and not e.missing] + names + missing


def check(choice: str, family: str, local: Sequence[str]) -> None:
    """Check that ``choice`` is, or was, in the :func:`menu`.

    A saved graph may contain a text that is no longer in the menu: "mar-base (download 832 MB)" disappears after the
    download and stays valid.

    Raises:
        UserError: it names neither a local file nor an entry.
    """
    names = {*local, *map(_without_shard, local)} if KINDS[family].folder else local
    if not isinstance(choice, str) or choice not in names and _entry(choice, family) is None:
        found = _quoted(str(choice))
        raise UserError(f"{KINDS[family].field}: {found} is none of the files here; choose another from the list")


def resolve(
    choice: str,
    family: str,
    folders: Sequence[Path],
    download_to: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The file or folder of a choice, downloaded if necessary.

    Args:
        choice: see the module's documentation.
        family: a key of :data:`.families.KINDS`.
        folders: model folders to search.
        download_to: folder for downloads; created if necessary.
        progress: called in this thread with (bytes received, total bytes or 0) several times per second during a download.
            An exception from it cancels the download; the next call resumes it.

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
    found = next(_folders_holding(entry, [*folders, Path(download_to)]), None)
    if found is None:
        found = _fetch(entry, Path(download_to), field, progress)
    else:
        for path in (found / name for name, _ in entry.names):
            if os.path.isfile(path):
                check_digest(path, entry.sha256, field, lambda: progress(0, 0) if progress else None)
    return found if entry.parts else found / entry.names[0][0]


def absent(choice: str, family: str, folders: Sequence[Path]) -> Entry | None:
    """The catalogue entry that :func:`resolve` would download for a choice; None for built-in entries and files that are here."""
    entry = _entry(choice, family)
    if entry is None or entry.built_in:
        return None
    return entry if next(_folders_holding(entry, [*map(Path, folders)]), None) is None else None


def decoder_for(choice: str, path: Path | None = None, family: str = "mar", text: bool | None = None) -> str:
    """The id of the decoder that "auto" selects for a MAR, LlamaGen, PAR or Tar de-tokenizer.

    The first of these: the catalogue entry's decoder, the decoder in the file's metadata, the decoder of a catalogue entry
    with the same file name, the official decoder. The official decoder is KL-16 for MAR and VQ-16 otherwise; LlamaGen's
    text-to-image models have their own VQ-16.

    Args:
        choice: the checkpoint choice.
        path: the resolved file, whose metadata may name a decoder.
        family: "mar", "hybrid", "llamagen" or "dtok".
        text: whether the model is text-conditional; None detects "t2i" in the file name.
    """
    decoders, official = _DECODERS[family]
    entry = _entry(choice, family)
    if entry and entry.decoder:
        return entry.decoder
    named = read_metadata(path).get("decoder") if path else None
    if named in {e.id for e in entries(decoders)}:
        return str(named)
    name = path.name if path else PureWindowsPath(choice).name
    same = next((e for e in entries(family) if PurePosixPath(e.file).name == name and not e.built_in), None)
    if same and same.decoder:
        return same.decoder
    from_text = "t2i" in name.lower() if text is None else text
    return _TEXT_DECODER if family == "llamagen" and from_text else official


def ta_tok_for(choice: str, path: Path | None = None) -> str:
    """The id of the TA-Tok that "auto" selects for a de-tokenizer: from the file's metadata, else the official one.

    Args:
        choice: the checkpoint choice.
        path: the resolved file, whose metadata may name a TA-Tok.
    """
    named = read_metadata(path).get("ta_tok") if path else None
    if named in {e.id for e in entries("ta-tok")}:
        return str(named)
    entry = _entry(choice, "dtok")
    if entry and entry.built_in:
        return next((e.id for e in entries("ta-tok") if e.built_in), _TA_TOK)
    return _TA_TOK


def draft_for(choice: str) -> str | None:
    """The id of an entry's default draft model, or None; files have none."""
    name = _DOWNLOAD_SUFFIX.sub("", choice.strip())
    return next((e.draft for e in _catalogue() if e.id == name), None)


def _entry(choice: str, family: str) -> Entry | None:
    """The catalogue entry of a choice, or None.

    Raises:
        UserError: the entry is of another family, or the choice is no text.
    """
    if not isinstance(choice, str):
        raise UserError(
            f"{KINDS[family].field}: it got a {type(choice).__name__}, not a name; choose one from the list"
        )
    name = _DOWNLOAD_SUFFIX.sub("", choice.strip())
    entry = next((e for e in _catalogue() if e.id == name), None)
    if entry and entry.family != family:
        field, kind = KINDS[family].field, KINDS[entry.family]
        remedy = "choose another from the list" if kind.field == field else f"choose it as {kind.field}"
        raise UserError(f"{field}: {name} is {kind.noun}, not {KINDS[family].noun}; {remedy}")
    return entry


def _folders_holding(entry: Entry, folders: Sequence[Path]) -> Iterator[Path]:
    """The folders that hold a catalogued entry, the nearest first: a single file may lie in a subfolder of a model folder."""
    for folder in folders:
        found = folder / entry.folder
        if all(os.path.isfile(found / name) for name, optional in entry.names if not optional):
            yield found
    if not entry.parts:
        for folder in folders:
            yield from (path.parent for path in sorted(folder.rglob(entry.file)) if path.is_file())


def _fetch(entry: Entry, download_to: Path, field: str, progress: Callable[[int, int], None] | None) -> Path:
    """Download the missing files of an entry; returns their folder."""
    to, done = download_to / entry.folder, 0

    def report(received: int, total: int) -> None:
        if progress is not None:
            progress(done + received, (entry.size or 0) if entry.parts else total)

    for name, optional in entry.names:
        if not os.path.isfile(to / name):
            try:
                download(
                    entry.repo or "",
                    name,
                    to,
                    revision=entry.revision,
                    sha256=entry.sha256,
                    progress=report if progress else None,
                    field=field,
                )
            except Missing:
                if not optional:
                    raise
                continue
        done += (to / name).stat().st_size
    return to


def _local(choice: str, folders: Sequence[Path], field: str, folder_too: bool = False) -> Path:
    """The local file of a choice, or with ``folder_too`` the local folder.

    Raises:
        UserError: it does not exist, or the name is absolute or contains "..".
    """
    windows = PureWindowsPath(choice)  # parses both separators, drives and shares on every system
    if not choice.strip() or "\0" in choice or windows.anchor or ".." in windows.parts:
        raise UserError(
            f"{field}: {_quoted(choice)} is not the name of a file in a model folder (nor may it be a full path or "
            "contain '..'); choose one from the list"
        )
    for folder in folders:
        # Graphs saved on Windows contain sub\name, others sub/name.
        for path in (folder / choice, folder.joinpath(*windows.parts)):
            # Links are followed, as in ComfyUI.
            if os.path.isfile(path) or folder_too and windows.parts and os.path.isdir(path):
                return path
    where = " or ".join(map(str, folders)) or "any model folder"
    raise UserError(f"{field}: {_quoted(choice)} is not in {where}; put it there or choose another")


def _without_shard(name: str) -> str:
    """The folder of Hugging Face weights ("xl" for "xl/model.safetensors" or "xl/model-00001-of-00002.safetensors"); other
    names unchanged."""
    return re.sub(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$", "", name)


def _quoted(choice: str) -> str:
    return ascii(choice[:77] + "..." if len(choice) > 80 else choice)
