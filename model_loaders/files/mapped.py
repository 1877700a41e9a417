"""Safetensors files, mapped into memory read-only.

The library gives torch a private mapping, which could be written to. Linux and Windows promise memory for all of it, so
that a file of 29 GB does not open where 24 GB are free, although its weights are read one by one
(https://github.com/safetensors/safetensors/issues/528). A read-only mapping needs no memory of its own.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# Dtypes by their names in a header; of torch's newer ones, those that this version has.
_DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class UnknownDtype(ValueError):
    """A tensor has a dtype that torch does not have."""


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file, opened by the library, which checks its header. numpy's tensors need no private mapping."""
    with safe_open(str(path), framework="np") as file:
        yield file


def read_tensors(path: Path, keep: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose names satisfy ``keep``, and the metadata.

    The tensors are views of the file and must not be written to: a write ends the process.

    Raises:
        UnknownDtype: a tensor has a dtype that torch does not have; the message names both.
        OSError: the file cannot be mapped.
        Exception: the file is damaged; the library says how.
    """
    with opened(path) as file:
        names = [name for name in file.keys() if keep(name)]
        metadata = dict(file.metadata() or {})

    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(length))
        mapping = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        tensors = {name: _tensor(mapping, 8 + length, name, header[name]) for name in names}

    return tensors, metadata


def _tensor(mapping: mmap.mmap, start: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    """A tensor by its entry in the header; ``start`` is the place of the first byte behind the header."""
    dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
    if dtype is None:
        raise UnknownDtype(f"{entry['dtype']} in {name[:80]}")

    shape = entry["shape"]
    count = math.prod(shape)
    if not count:  # torch makes no view of no bytes
        return torch.empty(shape, dtype=dtype)

    begin = start + entry["data_offsets"][0]
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin).view(shape)
