"""Catalogue of weight files: the built-in demo, local files, and entries of the Hugging Face Hub.

The latter are looked for in the model folders, then in the cache of huggingface-hub, where they are used as they lie
there, and are downloaded otherwise.

A *choice* is the selected menu text. Graphs travel between machines and versions, so more
texts are understood than a menu shows:

- an entry's id ("mar-base"), with or without "(download ...)", before and after its download;
- the name of a file or folder relative to one of the model folders, with the separators of any system;
- such a name of an entry's file that is not here: it stands for the entry.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from ...errors import UserError, did_you_mean
from ..files.checkpoint import expect_no_broken_link
from ..files.formats import SUFFIXES
from ..files.shards import INDEX, named_by_index
from ..kinds import KINDS
from .transfer import Missing, Remote, cached, download, readable_size

_PACKAGE = Path(__file__).resolve().parents[2]
# The decoder of LlamaGen's text-to-image models, and the TA-Tok of files that name none.
_TEXT_DECODER = "vq16-t2i"
_TA_TOK = "ta-tok"
# The remedy of a name that is none, in a menu, on a command line and in Python.
_GIVE = "choose a catalogue entry or a model file"
_LONGEST_CHOICE = 4096  # characters, as of a path
_DOWNLOAD_SUFFIX = re.compile(r" \(download[^()]*\)$")
# Files of a Hugging Face folder: its weights, or a shard of them.
_SHARD_OR_MODEL = re.compile(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$")

Progress = Callable[[int, int], None] | None


class Part(NamedTuple):
    """A file of an entry."""

    path: str  # below a model folder
    name: str  # in the repository
    sha256: str | None
    optional: bool  # whether the repository may lack it


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
    parts: Mapping[str, str | None] = field(default_factory=dict)
    draft: str | None = None
    note: str = ""
    network: str = ""
    dtype: str = ""
    grid: int = 0

    @property
    def built_in(self) -> bool:
        """Whether the file is part of the package."""
        return self.repo is None

    @property
    def missing(self) -> bool:
        """Whether the file should be part of the package but does not exist."""
        return self.built_in and not os.path.isfile(_PACKAGE / self.file)

    @property
    def files(self) -> list[Part]:
        """The files of the entry."""
        if not self.parts:
            return [Part(path=self.file, name=PureWindowsPath(self.file).name, sha256=self.sha256, optional=False)]

        parts = []
        for name, sha256 in self.parts.items():
            bare = name.removesuffix("?")
            parts.append(Part(path=f"{self.file}/{bare}", name=bare, sha256=sha256, optional=bare != name))

        return parts

    @property
    def index(self) -> str | None:
        """Name of the file that names the shards of the weights; None where the catalogue names the weights."""
        return next((part.name for part in self.files if part.name.endswith(INDEX)), None)

    def shards(self, folder: Path) -> list[Part]:
        """The shards that the index in the entry's ``folder`` names; none without an index."""
        if self.index is None or not os.path.isfile(folder / self.index):
            return []

        names = named_by_index(folder / self.index, KINDS[self.family].field)
        return [Part(path=f"{self.file}/{name}", name=name, sha256=None, optional=False) for name in names]

    @property
    def weights(self) -> set[str]:
        """Names of the weight files in the folder of an entry of several files, as far as the catalogue has them."""
        return {part.name for part in self.files if part.name.endswith(SUFFIXES)}

    @property
    def pinned(self) -> bool:
        """Whether the sha256 of all weights is known."""
        digests = [part.sha256 for part in self.files if part.name.endswith(SUFFIXES)]
        return bool(digests) and all(digests)

    @property
    def label(self) -> str:
        """Menu text while the file is not downloaded."""
        size = f" {readable_size(self.size)}" if self.size else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.id} (download{size}{note})"

    def remote(self, part: Part) -> Remote:
        """A file of the entry in its repository."""
        size = None if self.parts else self.size
        return Remote(repo=self.repo or "", name=part.name, revision=self.revision, sha256=part.sha256, size=size)

    def find(self, folders: Sequence[Path]) -> Path | None:
        """The file, or the folder of several files, in a model folder, a subfolder of one, or the Hugging Face cache.

        None if it is in none of them.
        """
        for folder in folders:
            for path in _below(folder, self.file):
                if self._whole(path):
                    return path

        return self._in_cache()

    def _in_cache(self) -> Path | None:
        """The file, or the folder of several files, in the cache of huggingface-hub; None unless all of it is there."""
        paths = [cached(self.remote(part)) for part in self.files if not part.optional]
        if not self.parts or paths[0] is None:
            return paths[0]

        folder = paths[0].parent
        is_whole = all(path is not None and path.parent == folder for path in paths) and self._whole(folder)
        return folder if is_whole else None

    def _whole(self, path: Path) -> bool:
        """Whether a path is the file, or the folder with all files."""
        if not self.parts:
            return path.is_file()

        names = [part.name for part in self.files if not part.optional]
        if self.index is not None:
            # The weights are the shards of an index, or a single file.
            try:
                shards = self.shards(path)
            except UserError:  # a damaged index
                return False
            names += [part.name for part in shards] or list(self.weights)

        return all((path / name).is_file() for name in names)


def _below(folder: Path, name: str) -> Iterator[Path]:
    """Existing paths below a folder that end with ``name``, which may contain folders.

    The one directly in the folder comes first, then the others by depth. Links are followed, as ComfyUI's menus do,
    and each folder is read once.
    """
    if os.path.exists(folder / name):
        yield folder / name

    seen: set[tuple[int, int]] = set()
    level = [folder]
    while level:
        below: list[Path] = []
        for place in level:
            try:
                about = place.stat()
                if (about.st_dev, about.st_ino) in seen:
                    continue
                seen.add((about.st_dev, about.st_ino))

                with os.scandir(place) as found:
                    inner = [entry for entry in found if entry.is_dir()]
            except OSError:  # a folder that must not be read
                continue
            below += [place / entry.name for entry in sorted(inner, key=lambda entry: entry.name)]

        yield from (place / name for place in below if os.path.exists(place / name))
        level = below


@lru_cache(maxsize=1)
def catalogue() -> tuple[Entry, ...]:
    """All entries, in the order of the file."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8-sig")
    return tuple(Entry(**fields) for fields in json.loads(text)["entries"])


def entries(family: str) -> list[Entry]:
    """Catalogue entries of a family (a key of :data:`.kinds.KINDS`), built-in entries first."""
    own = [entry for entry in catalogue() if entry.family == family]
    return sorted(own, key=lambda entry: not entry.built_in)


def entry_of(path: Path, family: str) -> str:
    """The id of the catalogue entry whose name a file has; "" for other files. ``family``: as of :func:`entries`."""
    for entry in entries(family):
        if f"/{path.as_posix()}".endswith(f"/{entry.file}"):
            return entry.id

    return ""


class _Place(NamedTuple):
    """Where a name in a model folder meets an entry.

    The name is that of the entry's file, or lies in the folder of an entry of several files.
    """

    file: str  # of the entry
    before: str  # the folders before the entry's file
    rest: str  # the file in the entry's folder


def _place(name: str, files: Iterable[str]) -> _Place | None:
    """Where a name meets an entry; ``files`` are those of the entries."""
    whole = f"/{name}/".replace("\\", "/")
    for file in files:
        before, found, rest = whole.partition(f"/{file}/")
        if found:
            return _Place(file=file, before=before, rest=rest.removesuffix("/"))

    return None


@lru_cache(maxsize=8)
def _places(names: tuple[str, ...], files: tuple[str, ...]) -> dict[str, _Place]:
    """The places of those names that meet an entry.

    One pass, and remembered, because ComfyUI asks for all menus at once and a folder may hold thousands of names.
    """
    places = {name: _place(name, files) for name in names}
    return {name: place for name, place in places.items() if place is not None}


@lru_cache(maxsize=8)
def _model_folders(names: tuple[str, ...]) -> dict[str, str]:
    """Of the names that are the weights of a Hugging Face folder, or a shard of them, the folder."""
    folders = {name: _SHARD_OR_MODEL.sub("", name) for name in names}
    return {name: folder for name, folder in folders.items() if name != folder}


def _downloads() -> dict[str, Entry]:
    """Downloadable entries by file."""
    return {entry.file: entry for entry in catalogue() if not entry.built_in}


def _complete(entry: Entry, names: set[str]) -> bool:
    """Whether names in the folder of an entry of several files are enough to load it.

    They are if they are all its weights, or there are weights of the user's own.
    """
    return not entry.parts or entry.weights <= names or bool(names - entry.weights)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """Menu of a loader: existing built-in entries, local files, then downloadable entries.

    ``local``: names relative to the model folders. An entry whose download is not complete is offered again.
    """
    # 1. Local files, without those of other families' entries.
    downloads = _downloads()
    places = _places(tuple(local), tuple(downloads))
    names: list[str] = []
    here: dict[tuple[str, str], set[str]] = {}  # names in the folder of an entry, by the folders before and the entry
    for name in local:
        place = places.get(name)
        if place is not None and downloads[place.file].family != family:
            continue
        names.append(name)
        if place is not None:
            here.setdefault((place.before, place.file), set()).add(place.rest)

    # 2. A model folder has one name.
    if KINDS[family].folder:
        model_folders = _model_folders(tuple(local))
        names = list(dict.fromkeys(model_folders.get(name, name) for name in names))

    # 3. Entries.
    complete = {file for (_, file), rests in here.items() if _complete(downloads[file], rests)}
    own = entries(family)
    built_in = [entry.id for entry in own if entry.built_in and not entry.missing]
    missing = [entry.label for entry in own if not entry.built_in and entry.file not in complete]

    return built_in + names + missing


def resolve(choice: str, family: str, folders: Sequence[Path], download_to: Path, progress: Progress = None) -> Path:
    """The file or folder of a choice, see the module's documentation, in the model folders ``folders``, or downloaded.

    Args:
        choice: the selected menu text.
        family: a key of :data:`.kinds.KINDS`.
        folders: the model folders.
        download_to: the folder for downloads, created if necessary.
        progress: gets (bytes received, total bytes or 0) several times a second; an exception from it cancels the
            download, and the next call resumes it.

    Raises:
        UserError: if there is no such file, the name leads outside the folders, or the download fails.
    """
    download_to = Path(download_to)
    wanted = _wanted(choice, family, [*map(Path, folders)])
    if isinstance(wanted, Path):
        return wanted
    if wanted.built_in:
        return _PACKAGE / wanted.file

    found = wanted.find([*map(Path, folders), download_to])
    return found or _fetch(wanted, download_to, KINDS[family].field, progress)


def absent(choice: str, family: str, folders: Sequence[Path]) -> Entry | None:
    """The catalogue entry that :func:`resolve` would download for a choice; None for what is here."""
    wanted = _wanted(choice, family, [*map(Path, folders)])
    if isinstance(wanted, Path) or wanted.built_in or wanted.find([*map(Path, folders)]):
        return None

    return wanted


def check(choice: str, family: str, folders: Sequence[Path], local: Sequence[str] = ()) -> None:
    """Raise a UserError if a choice stands for nothing that is here or can be downloaded, see :func:`resolve`.

    It reads no folder: ComfyUI validates graphs of any length on the thread that serves everything else. ``local``:
    names in the folders, of which the message recommends one with the same last part.
    """
    _wanted(choice, family, folders, local)


def _wanted(choice: str, family: str, folders: Sequence[Path], local: Sequence[str] = ()) -> Entry | Path:
    """What a choice stands for: a catalogue entry, here or not, or a local file or folder."""
    kind = KINDS[family]
    entry = _entry(choice, family)
    if entry is not None:
        if entry.missing:
            raise UserError(
                f"{kind.field}: the built-in file {entry.id} is missing from this installation; install FastAR again"
            )
        return entry

    path = _local(choice, folders, kind.field, kind.folder)
    entry = _named(choice, family)
    if entry is not None and (path is None or not _usable(path, entry)):
        return entry
    if path is not None:
        return path

    for folder in folders:
        expect_no_broken_link(folder.joinpath(*_parts(choice)), kind.field)

    where = " or ".join(map(str, folders)) or "any model folder"
    # ComfyUI may still list a file that was removed.
    others = [name for name in local if _parts(name) != _parts(choice)]
    same = next((name for name in others if _last_part(name) == _last_part(choice)), "")
    if same:
        remedy = f"choose {same[:80]!a}, which has the same name, or put the missing file there"
    else:
        remedy = suggested(choice, family) or "put the file there, or choose a different file"
    raise UserError(f"{kind.field}: {choice[:80]!a} is not in {where}; {remedy}")


def suggested(choice: str, family: str) -> str:
    """What to choose in place of a repository of the Hub, or of an entry that is misspelt; "" if nothing is similar.

    Of a repository the entries of ``family``, a key of :data:`.kinds.KINDS`, come before others. A misspelt name is
    compared with all entries of the same input first, so that a model gets one suggestion whoever looks for it.
    """
    repo = choice.lower().removeprefix("https://huggingface.co/").strip("/")
    for known in (entries(family), catalogue()):
        ids = [entry.id for entry in known if (entry.repo or "").lower() == repo]
        if ids:
            return f"to use this repository, choose {' or '.join(ids)}"

    everything = [entry.id for entry in catalogue()]
    alike = [entry.id for entry in catalogue() if KINDS[entry.family].field == KINDS[family].field]
    return did_you_mean(choice, alike) or did_you_mean(choice, everything)


def _parts(name: str) -> tuple[str, ...]:
    """The folders and the last part of a name in a model folder, which may have the separators of any system."""
    return PureWindowsPath(name).parts


def _last_part(name: str) -> str:
    """A name in a model folder without the folders."""
    return name.replace("\\", "/").rpartition("/")[2]


def _named(choice: str, family: str) -> Entry | None:
    """The entry of a family whose file or folder, or a weight file in it, a name is."""
    downloads = _downloads()
    place = _place(choice, downloads)
    if place is None:
        return None

    entry = downloads[place.file]
    whole = not place.rest or place.rest in entry.weights
    return entry if entry.family == family and whole else None


def _usable(path: Path, entry: Entry) -> bool:
    """Whether a local file or folder under an entry's name is not a part of a download."""
    if path.is_file():
        return True

    # An index stands for a download; without one there are weights of the user's own, if any.
    if entry.index is not None and os.path.isfile(path / entry.index):
        return entry._whole(path)

    return _complete(entry, {file.name for file in path.iterdir() if file.suffix in SUFFIXES})


def decoder_for(choice: str, family: str, stated: str | None = None, text: bool = False) -> str:
    """The id of the decoder that "auto" selects for a model.

    It is that of the model's catalogue entry (chosen by id or file), or stated in the file's metadata, or the official
    one; LlamaGen's text-to-image models (``text``) have their own.
    """
    return stated_decoder(choice, family, stated) or (_TEXT_DECODER if text else KINDS[family].decoder)


def stated_decoder(choice: str, family: str, stated: str | None = None) -> str | None:
    """The id of the decoder that a model's catalogue entry (chosen by id or file) or its metadata names.

    None if neither does.
    """
    entry = _entry(choice, family) or _named(choice, family)
    if entry and entry.decoder:
        return entry.decoder

    kind = next(e.family for e in catalogue() if e.id == KINDS[family].decoder)
    return str(stated) if stated in [e.id for e in entries(kind)] else None


def ta_tok_for(stated: str | None) -> str:
    """The id of the TA-Tok that "auto" selects for a de-tokenizer: the one in its metadata, else the official one."""
    return str(stated) if stated in [e.id for e in entries("ta-tok")] else _TA_TOK


def draft_for(choice: str) -> str | None:
    """The id of an entry's default draft model, or None; files have none."""
    return next((e.draft for e in catalogue() if e.id == _id(choice)), None)


def _id(choice: str) -> str:
    """The id in a menu text."""
    return _DOWNLOAD_SUFFIX.sub("", choice.strip())


def _entry(choice: str, family: str) -> Entry | None:
    """The catalogue entry of a choice, None for a file."""
    wanted = KINDS[family]
    if not isinstance(choice, str):
        raise UserError(f"{wanted.field}: it got a value of the type {type(choice).__name__}, not a name; {_GIVE}")
    if len(choice) > _LONGEST_CHOICE:  # a server's event loop looks for it
        raise UserError(
            f"{wanted.field}: {choice[:80]!a}... is too long for a file name ({len(choice)} characters); {_GIVE}"
        )

    entry = next((e for e in catalogue() if e.id == _id(choice)), None)
    if entry is None or entry.family == family:
        return entry

    kind = KINDS[entry.family]
    remedy = "choose a different entry" if kind.field == wanted.field else f"choose it in {kind.input}"
    raise UserError(f"{wanted.field}: {entry.id} is {kind.noun}, not {wanted.noun}; {remedy}")


def _fetch(entry: Entry, download_to: Path, field: str, progress: Progress) -> Path:
    """Download the missing files of an entry; returns its file, or the folder of several."""
    done = 0

    def report(received: int, total: int) -> None:
        if progress is not None:
            progress(done + received, (entry.size or 0) if entry.parts else total)

    for part in _to_fetch(entry, download_to / entry.file):
        path = download_to / part.path
        if not path.is_file():
            try:
                download(entry.remote(part), path, field, report)
            except Missing:
                if not part.optional:
                    raise
                continue

        done += path.stat().st_size

    return download_to / entry.file


def _to_fetch(entry: Entry, folder: Path) -> Iterator[Part]:
    """The files of an entry, then the shards that its index names, which is in ``folder`` by then."""
    yield from entry.files
    yield from entry.shards(folder)


def _local(choice: str, folders: Sequence[Path], field: str, folder_too: bool = False) -> Path | None:
    """The local file of a choice, or with ``folder_too`` the folder; None if there is none."""
    windows = PureWindowsPath(choice)  # parses both separators, drives and shares on every system
    if not choice.strip() or "\0" in choice or windows.anchor or ".." in windows.parts:
        raise UserError(
            f"{field}: {choice[:80]!a} is not the name of a file in a model folder. A full path or '..' is "
            f"not allowed here; {_GIVE}"
        )

    for folder in folders:
        # Graphs saved on Windows contain sub\name, others sub/name.
        for path in (folder / choice, folder.joinpath(*windows.parts)):
            # Links are followed, as in ComfyUI.
            if os.path.isfile(path) or folder_too and windows.parts and os.path.isdir(path):
                return path

    return None
