"""Which weight files there are: the built-in demo, a person's own files, and a catalogue that can be downloaded.

A *choice* is the text a person picked: an entry's id ("mar-base", with or without its "(download ...)"), or the name
of a file below one of the model folders. Saved graphs keep choices for years, so every text a menu ever showed goes on
resolving, before and after the download. A text encoder ("t5") and a language model ("tar") may be a folder as well as a file.
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
FIELDS = {
    "mar": "checkpoint",
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
    "llamagen": "a LlamaGen",
    "kl": "a KL decoder",
    "vq": "a VQ decoder",
    "t5": "a text encoder",
    "tar": "a Tar language model",
    "dtok": "a Tar de-tokenizer",
    "ta-tok": "a TA-Tok",
    "upsampler": "a latent up-sampler",
}
# Family to the family of its decoders, and the decoder of the files that say nothing.
_DECODERS = {"mar": ("kl", "kl16"), "llamagen": ("vq", "vq16-c2i"), "dtok": ("vq", "vq16-t2i")}
_TEXT_DECODER = "vq16-t2i"
# Families whose files may be a folder's.
_FOLDERS = ("t5", "tar")
_TA_TOK = "ta-tok"
# Ends the name of a part that the repository need not have.
_OPTIONAL = "?"
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
    parts: Sequence[str] = ()
    draft: str | None = None

    @property
    def built_in(self) -> bool:
        """Whether the file comes with the package."""
        return self.repo is None

    @property
    def missing(self) -> bool:
        """Whether it should have come with the package and did not."""
        return self.built_in and not os.path.isfile(_PACKAGE / self.file)

    @property
    def label(self) -> str:
        """What a menu shows while the file is not here."""
        return f"{self.id} (download {readable_size(self.size)})" if self.size else f"{self.id} (download)"


@lru_cache(maxsize=1)
def _catalogue() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return tuple(Entry(**fields) for fields in json.loads(text)["entries"])


def entries(family: str) -> list[Entry]:
    """The catalogue's entries of a family (one of :data:`FIELDS`), built-in ones first."""
    return sorted((e for e in _catalogue() if e.family == family), key=lambda e: not e.built_in)


def menu(family: str, local: Sequence[str]) -> list[str]:
    """What a loader offers: built-in entries that are here, local files, then entries that are not among them, with their size.

    Args:
        local: file names relative to the model folders, as ComfyUI lists them.
    """
    known = entries(family)
    others = {e.file for e in _catalogue() if e.family != family and not e.built_in}
    # What is catalogued for another loader would only be refused here.
    names = [name for name in local if not others & set(PureWindowsPath(name).parts)]
    if family in _FOLDERS:
        names = list(dict.fromkeys(_without_shard(name) for name in names))
    here = {_base(name) for name in names}
    missing = [e.label for e in known if not e.built_in and e.file not in here]
    return [e.id for e in known if e.built_in and not e.missing] + names + missing


def check(choice: str, family: str, local: Sequence[str]) -> None:
    """Nothing if ``choice`` is, or ever was, on the :func:`menu`.

    For hosts that compare a saved choice with today's menu: "mar-base (download 832 MB)" leaves the menu with the
    download, yet stays valid.

    Raises:
        UserError: it never was.
    """
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
    """The file (or folder) behind a choice, downloaded if it has to be.

    Args:
        choice: see the top of this module.
        family: one of :data:`FIELDS`.
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
        return _local(choice, folders, field, family in _FOLDERS)
    if entry.parts:
        return _several(entry, folders, Path(download_to), progress, field)
    if entry.built_in:
        path = _PACKAGE / entry.file
        if not os.path.isfile(path):
            raise UserError(f"{field}: the built-in {entry.id} is missing from this installation; install FastAR again")
        return path
    found = _find(entry.file, [*folders, Path(download_to)])
    return found or download(
        entry.repo or "",
        entry.file,
        Path(download_to),
        revision=entry.revision,
        size=entry.size,
        sha256=entry.sha256,
        progress=progress,
        field=field,
    )


def decoder_for(choice: str, path: Path | None = None, family: str = "mar", text: bool | None = None) -> str:
    """The decoder entry (an id) that "auto" means for a MAR, a LlamaGen, a PAR or a Tar de-tokenizer.

    In this order: what the catalogue says of the entry, what the file's metadata says, what the catalogue says of a
    file of that name, and else the official one: KL-16, which every published MAR uses, or VQ-16, of which LlamaGen's
    text-to-image models have their own.

    Args:
        choice: what was chosen as checkpoint.
        path: the file it resolved to, whose metadata may name a decoder.
        family: "mar", "llamagen" or "dtok".
        text: whether the model draws from text; None goes by "t2i" in the file's name.
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
    """The TA-Tok entry (an id) that "auto" means for a de-tokenizer: what its file's metadata names, else the official one.

    Args:
        choice: what was chosen as checkpoint.
        path: the file it resolved to, whose metadata may name one.
    """
    named = read_metadata(path).get("ta_tok") if path else None
    if named in {e.id for e in entries("ta-tok")}:
        return str(named)
    entry = _entry(choice, "dtok")
    if entry and entry.built_in:
        return next((e.id for e in entries("ta-tok") if e.built_in), _TA_TOK)
    return _TA_TOK


def draft_for(choice: str) -> str | None:
    """The entry (an id) that drafts for another entry where none is named; None if there is none, as for files."""
    name = _MARK.sub("", choice.strip())
    return next((e.draft for e in _catalogue() if e.id == name), None)


def up_sampler_for(decoder: str) -> str | None:
    """The latent up-sampler (an id) trained with a decoder (an id), if it is here."""
    name = _MARK.sub("", decoder.strip())
    return next((e.id for e in entries("upsampler") if e.decoder == name and not e.missing), None)


def _entry(choice: str, family: str) -> Entry | None:
    """The entry a choice names, if any.

    Raises:
        UserError: it names an entry of another family.
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


def _several(
    entry: Entry, folders: Sequence[Path], download_to: Path, progress: Callable[[int, int], None] | None, field: str
) -> Path:
    """The folder of an entry that is several files; what is missing of it is downloaded."""
    for folder in folders:
        if all(os.path.isfile(folder / entry.file / part) for part in entry.parts if not part.endswith(_OPTIONAL)):
            return folder / entry.file
    to, done = download_to / entry.file, 0

    def tell(now: int, _: int) -> None:
        if progress is not None:
            progress(done + now, entry.size or 0)

    for part in entry.parts:
        part, optional = part.removesuffix(_OPTIONAL), part.endswith(_OPTIONAL)
        if not os.path.isfile(to / part):
            try:
                download(
                    entry.repo or "",
                    part,
                    to,
                    revision=entry.revision,
                    progress=tell if progress else None,
                    field=field,
                )
            except UserError as e:
                if not (optional and "status 404" in str(e)):
                    raise
                continue
        done += (to / part).stat().st_size
    return to


def _local(choice: str, folders: Sequence[Path], field: str, folder_too: bool = False) -> Path:
    """The file (or, if that may be, the folder) of that name below one of the folders.

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
            if os.path.isfile(path) or folder_too and windows.parts and os.path.isdir(path):
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


def _without_shard(name: str) -> str:
    """The folder of weights as Hugging Face lays them out ("xl/model.safetensors", or "xl/model-00001-of-00002.safetensors" and
    its like); other names unchanged."""
    return re.sub(r"[\\/](?:[^\\/]*-of-\d+\.\w+|model\.safetensors|pytorch_model\.bin)$", "", name)


def _quoted(choice: str) -> str:
    return ascii(choice[:77] + "..." if len(choice) > 80 else choice)
