"""Records of a sweep's folder: cells and finished shards, and the bytes of their files."""

from __future__ import annotations

import hashlib
import io
import math
import tokenize
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A sampler with settings on a model.

    Attributes:
        id: name of its folder: readable words and 8 hexadecimal digits of the key.
        key: digest of all that its pictures depend on.
        title: name in tables and plots.
        model: what selected the model.
        model_digest: digest of the files of the model, its decoder and its draft model.
        family: model family of the registry.
        sampler: registry name, "fasthybrid+lazymar" for a combination.
        asked: settings that the spec gives, by name.
        settings: all settings, by name.
        seed: seed of the noise.
        images: how many the sweep asks for.
        size: height and width in pixels.
        baseline: id of the plain sampler's cell on the same model, or None.
        lossless: the word of ``reports.quality`` where PSNR has no meaning, or "".
    """

    id: str
    key: str
    title: str
    model: str
    model_digest: str
    family: str
    sampler: str
    asked: Mapping[str, Any]
    settings: Mapping[str, Any]
    seed: int
    images: int
    size: tuple[int, int]
    baseline: str | None
    lossless: str


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
        key: digest of the cell's key and the range.
        first: index of the first image.
        count: number of images.
        batch: images that were sampled at once, at most.
        retried_batch: the smaller batch after memory was insufficient, or None.
        sha256: of the pictures' bytes.
        bytes: size of the npz file.
        counts: of the report, see ``reports.record.COUNTS``; ``transformer_passes`` and ``head_calls`` are sequential calls of the
            whole shard, the others sums over its images.
        accepted, verified: drafts; 0 without drafts.
    """

    key: str
    first: int
    count: int
    batch: int
    retried_batch: int | None
    sha256: str
    bytes: int
    counts: Mapping[str, int] = field(default_factory=dict)
    accepted: int = 0
    verified: int = 0

    @property
    def stem(self) -> str:
        """Name of its files without the ending."""
        return stem(self.first, self.count)


def stem(first: int, count: int) -> str:
    """Name of a shard's files without the ending."""
    return f"shard-{first:07d}-{first + count - 1:07d}"


def ranges(images: int, batch: int) -> list[tuple[int, int]]:
    """(first, count) of the shards of a cell."""
    return [(first, min(batch, images - first)) for first in range(0, images, batch)]


def sha256(pictures: np.ndarray) -> str:
    """Digest of the bytes of pictures, uint8 [n, H, W, 3]."""
    return hashlib.sha256(np.ascontiguousarray(pictures).data).hexdigest()


def to_npz(**arrays: np.ndarray) -> bytes:
    """An uncompressed npz file whose bytes depend on the arrays alone."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, np.ascontiguousarray(array), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), part.getvalue())
    return out.getvalue()


def from_npz(data: bytes, name: str) -> np.ndarray:
    """An array of an uncompressed npz file. Its memory is bounded by the file's size.

    Raises:
        ValueError, KeyError, zipfile.BadZipFile, NotImplementedError: the file has another form, or its checksum is wrong.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        about = file.getinfo(f"{name}.npy")
        if about.compress_type != zipfile.ZIP_STORED:
            raise ValueError(name)
        stream = io.BytesIO(file.read(about))
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except (tokenize.TokenError, SyntaxError):  # of unbalanced brackets
        raise ValueError(name) from None
    rest = stream.getvalue()[stream.tell() :]
    if version != (1, 0) or fortran or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise ValueError(name)
    return np.frombuffer(bytearray(rest), dtype).reshape(shape)


def shard_key(cell_key: str, first: int, count: int) -> str:
    """Key of a shard: 32 hexadecimal digits of its cell's key and its range."""
    return hashlib.sha256(f"{cell_key}/{first}/{count}".encode()).hexdigest()[:32]


# Types of the fields of Cell and Shard as JSON holds them.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, int]": (dict,),
    "tuple[int, int]": (list,),
}


def checked(kind: type[T], found: Mapping[str, Any]) -> T:
    """An object of a dataclass from the fields of a JSON object; further fields are ignored.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or of another type.
    """
    values: dict[str, Any] = {}
    for f in fields(kind):  # type: ignore[arg-type]
        value = found[f.name]
        if not isinstance(value, _TYPES[str(f.type)]) or isinstance(value, bool):
            raise TypeError(f.name)
        if (
            isinstance(value, dict)
            and f.type == "Mapping[str, int]"
            and not all(isinstance(n, int) for n in value.values())
        ):
            raise TypeError(f.name)
        if isinstance(value, list):
            if len(value) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 20 for n in value):
                raise ValueError(f.name)
            value = (value[0], value[1])
        values[f.name] = value
    return kind(**values)
