"""Models that are a folder, as Hugging Face lays it out: weights in one file or numbered pieces, and JSON beside them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UserError
from . import checkpoint as ck

_PIECE = re.compile(r"-of-(\d+)\.\w+$")
# A tokenizer with its 65,536 image codes takes 12 MB.
_LARGEST_JSON = 256_000_000


def weight_files(path: Path, field: str, what: str) -> list[Path]:
    """The weight files of a folder (whole before pieces, safetensors before pickles), of one of its pieces, or the file itself.

    Args:
        field: what messages begin with.
        what: the kind of network ("a T5 encoder").

    Raises:
        UserError: there is nothing at that path, no weights in the folder, or not all of its pieces.
    """
    if not os.path.exists(path):  # unlike Path.exists, never an exception
        raise UserError(f"{field}: there is no file or folder {path}; put it there or choose another")
    folder = path.parent if _PIECE.search(path.name) else path
    if not os.path.isdir(folder):
        return [path]
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin")):
        whole, pieces = folder / f"{stem}.{ending}", sorted(folder.glob(f"{stem}-*-of-*.{ending}"))
        if whole.is_file():
            return [whole]
        if pieces:
            found = _PIECE.search(pieces[0].name)
            count = int(found[1]) if found else len(pieces)
            if len(pieces) != count:
                raise UserError(
                    f"{field}: {folder} holds {len(pieces)} of {count} pieces of its weights; put all of them there"
                )
            return pieces
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    raise UserError(
        f"{field}: {folder} holds no model.safetensors, nor pieces of it; choose a folder or file with {what}"
    )


def read_weights(path: Path, files: Sequence[Path], field: str) -> ck.Checkpoint:
    """The weights of several files as one checkpoint; the metadata are those of the first.

    Raises:
        UserError: see :func:`.checkpoint.read`, or two of the files hold a weight of one name.
    """
    state: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for i, file in enumerate(files):
        found = ck.read(file, field)
        twice = next((name for name in found.state if name in state), None)
        if twice is not None:
            raise found.complain(f"holds {twice[:80]!a}, which another piece holds too", "get the pieces again")
        state.update(found.state)
        metadata = metadata if i else found.metadata
    return ck.Checkpoint(state, metadata, path, field)


def read_json(path: Path, field: str) -> dict[str, Any]:
    """A JSON object in a file; {} if there is no such file.

    Raises:
        UserError: it is damaged, or no object.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError("it is too large")
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(
            f"{field}: {path.name} in {path.parent} cannot be read ({_first_line(e)}); get the file again"
        ) from e


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object in a text.

    Raises:
        ValueError: it is no JSON or no object.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
