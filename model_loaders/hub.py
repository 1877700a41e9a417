"""Catalogue of weight files: the built-in demo, local files, and entries that are downloaded from the Hugging Face Hub.

A *choice* is the selected menu text: an entry's id ("mar-base", with or without "(download ...)"), or a file name relative to one of the
model folders. Saved graphs contain choices, so every text a menu ever showed must resolve, before and after the download.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import UserError, first_line
from .families import KINDS

_PACKAGE = Path(__file__).resolve().parents[1]
# The decoder of LlamaGen's text-to-image models, and the TA-Tok of files that name none.
_TEXT_DECODER, _TA_TOK = "vq16-t2i", "ta-tok"
_DOWNLOAD_SUFFIX = re.compile(r" \(download[^()]*\)$")
# Files of a Hugging Face folder: its weights, or a shard of them.
_WEIGHTS = re.compile(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$")

Progress = Callable[[int, int], None] | None


def readable_size(count: float) -> str:
    """Format bytes in decimal units: 832 MB, 1.91 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


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
        """Paths of the files below a model folder, and whether the repository may lack them ("?" behind the name)."""
        parts = {f"{self.file}/{part.removesuffix('?')}": part.endswith("?") for part in self.parts}
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
    """The file or folder of a choice, see the module's documentation, in the model folders ``folders``, or downloaded.

    ``family`` is a key of :data:`.families.KINDS`; ``download_to``, the folder for downloads, is created if necessary. ``progress`` gets
    (bytes received, total bytes or 0) after every chunk; an exception from it cancels the download, and the next call resumes it. A
    UserError if there is no such file, the name leads outside the folders, or the download fails.
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
    return stated_decoder(choice, family, stated) or (_TEXT_DECODER if text else KINDS[family].decoder)


def stated_decoder(choice: str, family: str, stated: str | None = None) -> str | None:
    """The id of the decoder that a model's catalogue entry (chosen by id or file) or its metadata names; None if neither does."""
    file = f"/{PureWindowsPath(choice).as_posix()}"
    same = (e for e in entries(family) if not e.built_in and file.endswith(f"/{e.file}"))
    entry = _entry(choice, family) or next(same, None)
    if entry and entry.decoder:
        return entry.decoder
    kind = next(e.family for e in _catalogue() if e.id == KINDS[family].decoder)
    return str(stated) if stated in [e.id for e in entries(kind)] else None


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
                download(entry, path, field, report)
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
        wrong = "is not the name of a file in a model folder (nor may it be a full path or contain '..')"
        raise UserError(f"{field}: {choice[:80]!a} {wrong}; choose one from the list")
    for folder in folders:
        # Graphs saved on Windows contain sub\name, others sub/name.
        for path in (folder / choice, folder.joinpath(*windows.parts)):
            # Links are followed, as in ComfyUI.
            if os.path.isfile(path) or folder_too and windows.parts and os.path.isdir(path):
                return path
    where = " or ".join(map(str, folders)) or "any model folder"
    raise UserError(f"{field}: {choice[:80]!a} is not in {where}; put it there or choose another")


class Missing(UserError):
    """The repository has no such file."""


class _Part(io.FileIO):
    """A partial file; ``report`` gets its size after every chunk (10 MB), and what it raises ends the transfer."""

    def __init__(self, path: Path, report: Callable[[int], None]):
        super().__init__(path, "ab")
        self.report = report

    def write(self, chunk: Any) -> int:
        count = super().write(chunk)
        self.report(self.tell())
        return count


def download(entry: Entry, path: Path, field: str, progress: Callable[[int, int], None]) -> None:
    """Download the file of an entry's repository with the name of ``path`` to it.

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. Before the file is renamed, its length is
    verified, and its sha256 against the catalogue's, and the server's, where it states one. huggingface_hub handles ``HF_ENDPOINT``,
    ``HF_TOKEN``, ``HF_HUB_OFFLINE``, retries and the transfer. ``progress``: see :func:`resolve`. Raises :class:`Missing`, or a UserError
    for no connection, a refusal by the server, a full disk, or a corrupted file, with the address for a manual download.
    """
    file, to = path.name, path.parent
    by_hand = f"get it from https://huggingface.co/{entry.repo} and put it into {to}"
    try:
        import huggingface_hub as hub
        from filelock import FileLock, Timeout

        # Not hf_hub_download: since version 1.18 it deletes the partial file of an interrupted download, and the versions that
        # transformers 4 accepts (below 1.0) report no progress. This function transfers by HTTP, also where hf_xet is installed.
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers
    except ImportError as e:
        raise UserError(f"{field}: {file} needs huggingface-hub to be downloaded; install that, or {by_hand}") from e
    cancelled: list[Exception] = []

    def report(done: int, total: int) -> None:
        try:
            progress(done, total)
        except Exception as e:
            cancelled.append(e)
            raise

    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / f".{file}.lock", timeout=0):
            # 1. Ask for the length and the digest.
            url, headers = hub.hf_hub_url(entry.repo or "", file, revision=entry.revision), build_hf_headers()
            offer = hub.get_hf_file_metadata(url, timeout=10)
            etag, size = offer.etag or "", offer.size or 0
            part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag)[:16] or 'unknown'}.part"
            for other in to.glob(f".{file}.*.part"):  # of other versions
                if other != part or not etag:
                    other.unlink()
            # 2. Append what is missing to the partial file.
            with _Part(part, lambda done: report(done, size)) as opened:
                begin, free = opened.tell(), shutil.disk_usage(to).free
                if size - begin > free:
                    raise ValueError(f"it needs {readable_size(size)} and {readable_size(free)} are free")
                http_get(url, opened, resume_size=begin, headers=headers, expected_size=size or None)
            # 3. Verify and rename.
            digest = hashlib.sha256()
            with part.open("rb") as arrived:
                while chunk := arrived.read(1 << 22):
                    digest.update(chunk)
                    report(size, size)
            expected, found = [entry.sha256, etag if re.fullmatch("[0-9a-f]{64}", etag) else None], digest.hexdigest()
            if size and part.stat().st_size != size or any(stated not in (None, found) for stated in expected):
                part.unlink()
                raise ValueError(f"what arrived has another length or sha256 ({found[:16]}...)")
            os.replace(part, path)
            logging.getLogger(__name__).info("%s: sha256 %s", file, found)
    except Timeout as e:
        raise UserError(f"{field}: {file} is already being downloaded to {to}; wait for that to end") from e
    except Exception as e:  # huggingface_hub's depend on its version
        if e in cancelled:
            raise
        status = getattr(getattr(e, "response", None), "status_code", None)
        kind = Missing if status == 404 else UserError
        raise kind(f"{field}: {file} could not be downloaded ({_reason(e, status)}); {by_hand}") from e


def _reason(error: Exception, status: int | None) -> str:
    """A failed transfer's cause, for the message."""
    if status is not None:
        return f"status {status}{': a token in HF_TOKEN may help' if status in (401, 403) else ''}"
    if isinstance(error, OSError) and error.strerror:  # of the file system
        return error.strerror
    return f"{first_line(error).rstrip('.')}; HF_ENDPOINT may name a mirror, and HF_HUB_OFFLINE must not be set"
