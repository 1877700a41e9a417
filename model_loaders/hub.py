"""Catalogue of weight files: the built-in demo, local files, and entries that can be downloaded.

A *choice* is the selected menu text: an entry's id ("mar-base", with or without "(download ...)"), or a file name relative to
one of the model folders. Saved graphs contain choices, so every text a menu ever showed must resolve, before and after the
download. A text encoder ("t5") and a language model ("tar") may be a folder or a file.
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
from . import pins
from .checkpoint import read_metadata
from .download import download, readable_size

_PACKAGE = Path(__file__).resolve().parents[1]
# Family to the input that accepts its files; messages begin with it.
FIELDS = {
    "mar": "checkpoint",
    "hybrid": "checkpoint",
    "tokenizer": "checkpoint",
    "llamagen": "checkpoint",
    "kl": "decoder",
    "vq": "decoder",
    "t5": "encoder",
    "tar": "checkpoint",
    "dtok": "checkpoint",
    "ta-tok": "ta_tok",
    "upsampler": "up_sampler",
}
_WORDS = {
    "mar": "a MAR",
    "hybrid": "a Harmon or UniPic",
    "tokenizer": "a tokenizer",
    "llamagen": "a LlamaGen",
    "kl": "a KL decoder",
    "vq": "a VQ decoder",
    "t5": "a text encoder",
    "tar": "a Tar language model",
    "dtok": "a Tar de-tokenizer",
    "ta-tok": "a TA-Tok",
    "upsampler": "a latent up-sampler",
}
# Family to the family of its decoders, and the default decoder.
_DECODERS = {
    "mar": ("kl", "kl16"),
    "hybrid": ("kl", "kl16"),
    "llamagen": ("vq", "vq16-c2i"),
    "dtok": ("vq", "vq16-t2i"),
}
_TEXT_DECODER = "vq16-t2i"
# Families that may be a model folder.
_FOLDERS = ("t5", "tar", "hybrid", "tokenizer")
_TA_TOK = "ta-tok"
# Suffix of parts that are missing in some repositories.
_OPTIONAL = "?"
_MARK = re.compile(r" \(download[^()]*\)$")


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
    """Catalogue entries of a family (a key of :data:`FIELDS`), built-in entries first."""
    return sorted((e for e in _catalogue() if e.family == family), key=lambda e: not e.built_in)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """Menu of a loader: existing built-in entries, local files, then downloadable entries with their size.

    Args:
        family: a key of :data:`FIELDS`.
        local: file names relative to the model folders, as ComfyUI lists them.
    """
    catalogued = entries(family)
    others = {PurePosixPath(e.file).parts[0] for e in _catalogue() if e.family != family and not e.built_in}
    # Files catalogued for another loader are left out.
    names = [name for name in local if not others & set(PureWindowsPath(name).parts)]
    if family in _FOLDERS:
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
    _expect_text(choice, FIELDS[family])
    names = {*local, *map(_without_shard, local)} if family in _FOLDERS else local
    if choice not in names and _entry(choice, family) is None:
        raise UserError(f"{FIELDS[family]}: {_quoted(choice)} is none of the files here; choose another from the list")


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
        family: a key of :data:`FIELDS`.
        folders: model folders to search.
        download_to: folder for downloads; created if necessary.
        progress: called in this thread with (bytes received, total bytes or 0) several times per second during a download.
            An exception from it cancels the download; the next call resumes it.

    Raises:
        UserError: no such file, a name outside the folders, or a failed download.
    """
    field, folders = FIELDS[family], [*map(Path, folders)]
    _expect_text(choice, field)
    entry = _entry(choice, family)
    if entry is None:
        return _local(choice, folders, field, family in _FOLDERS)
    if entry.parts:
        return _resolve_parts(entry, folders, Path(download_to), progress, field)
    if entry.built_in:
        path = _PACKAGE / entry.file
        if not os.path.isfile(path):
            raise UserError(f"{field}: the built-in {entry.id} is missing from this installation; install FastAR again")
        return path
    found = _find(entry.file, [*folders, Path(download_to)])
    if found:
        pins.check(found, entry.sha256, field, lambda: progress(0, 0) if progress else None)
        return found
    path = Path(download_to) / entry.file
    return download(
        entry.repo or "",
        path.name,
        path.parent,
        revision=entry.revision,
        size=entry.size,
        sha256=entry.sha256,
        progress=progress,
        field=field,
    )


def absent(choice: str, family: str, folders: Sequence[Path]) -> Entry | None:
    """The catalogue entry that :func:`resolve` would download for a choice; None for built-in entries and files that are here."""
    entry = _entry(choice, family)
    if entry is None or entry.built_in:
        return None
    here = any(_holds(folder, entry) for folder in folders) if entry.parts else _find(entry.file, [*folders])
    return None if here else entry


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
    name = path.name if path else _base(choice)
    same = next((e for e in entries(family) if _base(e.file) == name and not e.built_in), None)
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
    name = _MARK.sub("", choice.strip())
    return next((e.draft for e in _catalogue() if e.id == name), None)


def up_sampler_for(decoder: str) -> str | None:
    """The id of the latent up-sampler trained with a decoder (an id), or None if there is none."""
    name = _MARK.sub("", decoder.strip())
    return next((e.id for e in entries("upsampler") if e.decoder == name and not e.missing), None)


def _entry(choice: str, family: str) -> Entry | None:
    """The catalogue entry of a choice, or None.

    Raises:
        UserError: the entry is of another family.
    """
    name = _MARK.sub("", choice.strip())
    entry = next((e for e in _catalogue() if e.id == name), None)
    if entry and entry.family != family:
        field, place = FIELDS[family], FIELDS[entry.family]
        if place == field:
            raise UserError(
                f"{field}: {name} is {_WORDS[entry.family]}, not {_WORDS[family]}; choose another from the list"
            )
        article = "an" if place[0] in "aeiou" else "a"
        raise UserError(f"{field}: {name} is {article} {place}; choose it as {place}")
    return entry


def _expect_text(choice: object, field: str) -> None:
    if not isinstance(choice, str):
        raise UserError(f"{field}: it got a {type(choice).__name__}, not a name; choose one from the list")


def _holds(folder: Path, entry: Entry) -> bool:
    """Whether a folder has all required files of an entry with several."""
    return all(os.path.isfile(folder / entry.file / part) for part in entry.parts if not part.endswith(_OPTIONAL))


def _resolve_parts(
    entry: Entry, folders: Sequence[Path], download_to: Path, progress: Callable[[int, int], None] | None, field: str
) -> Path:
    """The folder of an entry with several files; missing files are downloaded."""
    for folder in folders:
        if _holds(folder, entry):
            for part in entry.parts:
                if os.path.isfile(path := folder / entry.file / part.removesuffix(_OPTIONAL)):
                    pins.check(path, None, field)
            return folder / entry.file
    to, done = download_to / entry.file, 0

    def report(received: int, _: int) -> None:
        if progress is not None:
            progress(done + received, entry.size or 0)

    for part in entry.parts:
        part, optional = part.removesuffix(_OPTIONAL), part.endswith(_OPTIONAL)
        if not os.path.isfile(to / part):
            try:
                download(
                    entry.repo or "",
                    part,
                    to,
                    revision=entry.revision,
                    progress=report if progress else None,
                    field=field,
                )
            except UserError as e:
                if not (optional and "status 404" in str(e)):
                    raise
                continue
        done += (to / part).stat().st_size
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


def _find(file: str, folders: Sequence[Path]) -> Path | None:
    """A catalogued file in one of the folders or their subfolders, or None."""
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


def _without_shard(name: str) -> str:
    """The folder of Hugging Face weights ("xl" for "xl/model.safetensors" or "xl/model-00001-of-00002.safetensors"); other
    names unchanged."""
    return re.sub(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$", "", name)


def _quoted(choice: str) -> str:
    return ascii(choice[:77] + "..." if len(choice) > 80 else choice)
