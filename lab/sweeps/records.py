"""Records of a sweep's folder: cells and finished shards, and the bytes of their files."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...reports.reading import within

MOST_IMAGES = 10_000_000  # of a cell
MOST_BATCH = 4096  # images of a shard
MOST_SIDE = 8192  # pixels
# Name of a shard's record.
_SHARD = re.compile(r"shard-([0-9]{7})-([0-9]{7})\.json")


@dataclass(frozen=True)
class Cell:
    """A sampler with settings on a model."""

    id: str  # name of its folder: the sampler and 8 hexadecimal digits of the key
    key: str  # digest of all that its images depend on
    title: str  # name in tables and plots
    model: str  # what selected the model
    model_digest: str  # of the files of the model, its decoder and its draft model
    family: str  # of the registry
    sampler: str  # registry name, "fasthybrid+lazymar" for a combination
    asked: Mapping[str, Any]  # settings that the spec gives
    settings: Mapping[str, Any]  # all settings
    seed: int  # of the noise
    images: int = field(metadata=within(0, MOST_IMAGES))  # how many the sweep asks for
    size: tuple[int, int] = field(metadata=within(1, MOST_SIDE))  # height and width in pixels
    baseline: str | None  # id of the plain sampler's cell on the same model
    lossless: str  # the word of reports.quality where PSNR has no meaning, or ""


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    In ``counts``, transformer passes and head calls are those of the whole shard, others sums over its images.
    """

    key: str  # digest of the cell's key and the range
    first: int  # index of the first image
    count: int = field(metadata=within(0, MOST_BATCH))  # number of images
    note: str  # of the report: whether memory was insufficient for the whole batch
    sha256: str = ""  # of the images' bytes
    bytes: int = 0  # size of the npz file
    counts: Mapping[str, int] = field(default_factory=dict)  # of the report, see reports.record.COUNTS

    @property
    def stem(self) -> str:
        """Name of its files without the ending."""
        return stem(self.first, self.count)


def stem(first: int, count: int) -> str:
    """Name of a shard's files without the ending."""
    return f"shard-{first:07d}-{first + count - 1:07d}"


def range_of(name: str) -> tuple[int, int] | None:
    """(first, count) of a record's file name; None for other files."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return None

    first = int(found[1])
    last = int(found[2])
    return first, last - first + 1


def ranges(images: int, batch: int) -> list[tuple[int, int]]:
    """(first, count) of the shards of a cell."""
    return [(first, min(batch, images - first)) for first in range(0, images, batch)]


def shard_key(cell_key: str, first: int, count: int) -> str:
    """Key of a shard: 32 hexadecimal digits of its cell's key and its range."""
    return hashlib.sha256(f"{cell_key}/{first}/{count}".encode()).hexdigest()[:32]


def sha256(pictures: np.ndarray) -> str:
    """Digest of the bytes of images, uint8 [n, H, W, 3]."""
    return hashlib.sha256(np.ascontiguousarray(pictures).data).hexdigest()


def to_npz(**arrays: np.ndarray) -> bytes:
    """An uncompressed npz file whose bytes depend on the arrays alone."""
    out = io.BytesIO()

    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, np.ascontiguousarray(array), allow_pickle=False)

            about = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            file.writestr(about, part.getvalue())

    return out.getvalue()


def from_npz(data: bytes, name: str) -> np.ndarray:
    """An array of an npz file. Raises ValueError if it is damaged, which the checksums of the file tell."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            found: np.ndarray = file[name]
            return found
    except (KeyError, EOFError, OSError, zipfile.BadZipFile) as e:
        raise ValueError(name) from e


def whole(value: Any, low: int, high: int) -> bool:
    """Whether a value is an integer in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
