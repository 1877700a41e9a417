"""Hugging Face model folders: one weight file or numbered shards, and JSON files."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line

_SHARD = re.compile(r"-of-(\d+)\.\w+$")
MAX_JSON_BYTES = 32_000_000  # a tokenizer with 65,536 image codes has 12 MB
_MAX_DIGITS = 25


def weight_files(path: Path, field: str, what: str) -> list[Path]:
    """The weight files of a model folder, or of the folder of a shard, or the file itself; ``what`` is the kind of network, for messages.

    A single file is preferred to shards, and safetensors to pickles. A UserError if there are none, or not all shards.
    """
    if not os.path.exists(path):  # Path.exists can raise
        raise UserError(f"{field}: there is no file or folder {path}; put it there or choose another")
    folder = path.parent if _SHARD.search(path.name) else path
    if not os.path.isdir(folder):
        return [path]
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return [member(folder / f"{stem}.{suffix}", field)]
        shards = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            match = _SHARD.search(shards[0].name)
            if match and len(shards) != int(match[1]):
                raise UserError(
                    f"{field}: {folder} holds {len(shards)} of {int(match[1])} shards; put all of them there"
                )
            return [member(shard, field) for shard in shards]
    raise UserError(f"{field}: {folder} holds no model.safetensors or shards; choose a folder or file with {what}")


def member(path: Path, field: str) -> Path:
    """A file of a model folder; a UserError if it is a link out of it, unless within Hugging Face's cache."""
    folder, target = path.parent.resolve(), path.resolve()
    cached = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if folder not in target.parents and not cached:
        raise UserError(f"{field}: {path.name} in {path.parent} is a link out of that folder; put the file there")
    return path


def read_text(path: Path, field: str) -> str:
    """The text of a file of a model folder; a UserError if it is unreadable, too large, or a link out of the folder."""
    member(path, field)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise UserError(
            f"{field}: {path.name} in {path.parent} cannot be read ({first_line(e)}); get the file again"
        ) from e


def read_json(path: Path, field: str) -> dict[str, Any]:
    """A JSON object from a file of a model folder; {} if the file does not exist. Errors as :func:`parse_json`."""
    return parse_json(read_text(path, field), f"{path.name} in {path.parent}", field) if path.is_file() else {}


def parse_json(text: str, where: str, field: str) -> dict[str, Any]:
    """A JSON object of finite numbers with at most 25 digits, else a UserError; Python's parser also accepts NaN and endless integers."""

    def integer(text: str) -> int:
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"it holds a number of {len(text)} digits")
        return int(text)

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"it holds the number {text[:20]}")
        return float(text)

    try:
        value = json.loads(text, parse_int=integer, parse_float=finite, parse_constant=finite)
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        return value
    except (ValueError, RecursionError) as e:
        raise UserError(f"{field}: {where} cannot be read ({first_line(e)}); get the file again") from e
