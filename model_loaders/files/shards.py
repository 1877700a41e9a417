"""Which files hold the weights of a model folder: one file, or the shards of one set, never files of two models."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from ...errors import UserError
from .checkpoint import expect_no_broken_link, member, read_json
from .formats import SUFFIXES
from .wrappers import listed

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<suffix>\w+)")
INDEX = ".index.json"  # how the name of an index ends
# Files of a model folder in order of preference: Hugging Face's tools write the same weights in both formats.
_SINGLE = (("model", "safetensors"), ("diffusion_pytorch_model", "safetensors"), ("pytorch_model", "bin"))
# Folders of a diffusers pipeline, of which one has the weights that a model is identified by.
_PIPELINE = ("text_encoder", "transformer")
_MOST_SHARDS = 1000


class _Set(NamedTuple):
    """A set of shards."""

    stem: str  # of their names, in front of the number
    total: str  # how many there are, as their names say
    suffix: str
    width: int  # digits of a shard's number

    def names(self) -> list[str]:
        """The names of all shards of the set."""
        numbers = range(1, int(self.total) + 1)
        return [f"{self.stem}-{i:0{self.width}}-of-{self.total}.{self.suffix}" for i in numbers]

    def __str__(self) -> str:
        return f"{self.stem}-*-of-{self.total}.{self.suffix}"


def weight_files(path: Path, field: str, what: str) -> list[Path]:
    """The files that hold the weights of a choice.

    Args:
        path: a weight file; one of several shards, which stands for its set; the index of a set; or a model folder.
        field: name of the input that selected it.
        what: the kind of network ("a MAR"), for messages.

    Raises:
        UserError: if there are none, not all shards of the set, or a folder holds the weights of several models.
    """
    if not os.path.exists(path):  # Path.exists can raise
        expect_no_broken_link(path, field)
        raise UserError(f"{field}: there is no file or folder {path}; put the model there, or choose a different model")
    if not os.path.isdir(path):
        if path.name.endswith(INDEX):
            return _complete(path.parent, named_by_index(path, field), field)
        chosen = _set_of(path.name)
        return [path] if chosen is None else _complete(path.parent, chosen.names(), field)

    candidates = _candidates(path, field)
    for part in _PIPELINE:
        if not candidates and (path / part).is_dir():
            path = path / part
            candidates = _candidates(path, field)

    if not candidates:
        others = [name for name in os.listdir(path) if name.lower().endswith(SUFFIXES)]
        only = f"; its only weight files are {listed(others)}" if others else ""
        raise UserError(
            f"{field}: {path} does not hold model.safetensors, diffusion_pytorch_model.safetensors or "
            f"pytorch_model.bin, nor the shards (parts) of such a file{only}; choose a folder or file with {what}"
        )
    if len(candidates) > 1:
        raise UserError(
            f"{field}: {path.name} holds the weights of several models ({', '.join(candidates)[:160]}); choose a file "
            "of one model, or move the other models to folders of their own"
        )

    return _complete(path, next(iter(candidates.values())), field)


def _set_of(name: str) -> _Set | None:
    """The set that a shard of this name belongs to; None if the name is not that of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= _MOST_SHARDS:
        return None

    return _Set(stem=match["stem"], total=match["count"], suffix=match["suffix"], width=len(match["number"]))


def _candidates(folder: Path, field: str) -> dict[str, list[str]]:
    """The weights in a folder, of the preferred format only: a name for each, and its files.

    Where an index names one of several sets of shards, that set alone.
    """
    names = sorted(os.listdir(folder))
    sets = [shards for name in names if (shards := _set_of(name))]

    for stem, suffix in _SINGLE:
        found = {str(shards): shards.names() for shards in sets if shards.suffix == suffix}
        single = f"{stem}.{suffix}"
        index = folder / f"{single}{INDEX}"
        stated = named_by_index(index, field) if found and os.path.lexists(index) else []

        if single in names:
            found[single] = [single]
        elif stated in found.values():
            return {index.name: stated}
        if found:
            return found

    return {}


def named_by_index(index: Path, field: str) -> list[str]:
    """Names of the files in an index of Hugging Face's tools."""
    weights = read_json(index, field).get("weight_map")
    names = sorted({str(name) for name in weights.values()}) if isinstance(weights, dict) else []
    if not 1 <= len(names) <= _MOST_SHARDS or not all(map(_is_weight_file, names)):
        raise UserError(
            f"{field}: {index.name} in {index.parent} must name weight files in the same folder and nothing else; "
            "download this index file again"
        )

    return names


def _is_weight_file(name: str) -> bool:
    """Whether a name can be that of a weight file without a folder, on any system."""
    return PureWindowsPath(name).name == name and name.isprintable() and name.lower().endswith(SUFFIXES)


def _complete(folder: Path, names: Sequence[str], field: str) -> list[Path]:
    """Files of a folder; a UserError if one is missing."""
    missing = [name for name in names if not os.path.lexists(folder / name)]
    if missing:
        raise UserError(
            f"{field}: {folder.name} has only {len(names) - len(missing)} of {len(names)} shards; put the missing "
            f"shards ({listed(missing, 2)}) into the same folder"
        )

    return [member(folder / name, field) for name in names]
