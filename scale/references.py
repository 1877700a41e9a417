"""Reference pictures of an evaluation: an npz file as the ADM evaluator writes it, or a folder of pictures.

An npz file holds ``arr_0`` uint8 [N, H, W, 3], or only the statistics ``mu`` [D] and ``sigma`` [D, D] of Inception's features, which are
enough for FID. Pictures are read in chunks, so that memory does not depend on their number.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import UserError, first_line

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CHUNK = 256  # pictures that are in memory at a time
_MOST = 10_000_000
_LONGEST_SIDE = 16384
_MOST_FEATURES = 1 << 14


@dataclass(frozen=True)
class Reference:
    """Pictures or statistics that cells are compared with.

    Attributes:
        path: the file or folder.
        count: number of pictures; 0 if the file holds statistics only.
        size: height and width of the pictures; (0, 0) for statistics.
        digest: 32 hexadecimal digits of its content.
        files: of a folder, sorted.
    """

    path: Path
    count: int
    size: tuple[int, int]
    digest: str
    files: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Name in results."""
        return self.path.name

    def images(self) -> Iterator[np.ndarray]:
        """The pictures in chunks, uint8 [n, H, W, 3].

        Raises:
            UserError: a file cannot be read, or has another size.
        """
        return self._of_folder() if self.files else self._of_npz()

    def statistics(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean float64 [D] and covariance [D, D] of the file, or None if it holds pictures."""
        if self.count:
            return None
        with _opened(self.path) as file:
            mean, covariance = (np.asarray(_array(file, name, self.path), np.float64) for name in ("mu", "sigma"))
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            raise UserError(f"reference: {self.name} holds statistics that are not finite.")
        return mean, covariance

    def _of_npz(self) -> Iterator[np.ndarray]:
        with _opened(self.path) as file, file.open("arr_0.npy") as stream:
            _header(stream, self.path)
            picture = self.size[0] * self.size[1] * 3
            for at in range(0, self.count, CHUNK):
                n = min(CHUNK, self.count - at)
                data = stream.read(n * picture)
                if len(data) != n * picture:
                    raise UserError(f"reference: {self.name} ends early; copy it again.")
                yield np.frombuffer(data, np.uint8).reshape(n, *self.size, 3).copy()  # torch takes writable arrays

    def _of_folder(self) -> Iterator[np.ndarray]:
        for at in range(0, self.count, CHUNK):
            yield np.stack([_picture(path, self.size) for path in self.files[at : at + CHUNK]])


def open_reference(path: Path) -> Reference:
    """A reference; its pictures are not read yet, but its content is digested.

    Raises:
        UserError: it is missing, holds no pictures, or another array.
    """
    if path.is_dir():
        files = tuple(sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS))
        if not files:
            raise UserError(f"reference: {path} holds no pictures ({', '.join(ENDINGS)}).")
        size = _picture(files[0]).shape[:2]
        return Reference(path, len(files), (size[0], size[1]), _digest(path, files), files)
    if not path.is_file():
        raise UserError(f"reference: there is no {path}; name an npz file or a folder of pictures.")
    with _opened(path) as file:
        names = set(file.namelist())
        if "arr_0.npy" in names:
            with file.open("arr_0.npy") as stream:
                shape = _header(stream, path)
            return Reference(path, shape[0], (shape[1], shape[2]), _digest(path))
    if not {"mu.npy", "sigma.npy"} <= names:
        raise UserError(
            f"reference: {path.name} holds neither arr_0 (pictures) nor mu and sigma (statistics of Inception)."
        )
    return Reference(path, 0, (0, 0), _digest(path))


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as e:
        raise UserError(f"reference: {path.name} is no npz file ({first_line(e)}).") from None


def _read_header(stream: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type of an array; the stream is then at its first value."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(stream)
    except (ValueError, EOFError, OSError) as e:
        raise UserError(f"reference: {path.name} is damaged ({first_line(e)}).") from None


def _header(stream: IO[bytes], path: Path) -> tuple[int, ...]:
    """Shape of the pictures [N, H, W, 3]."""
    shape, transposed, kind = _read_header(stream, path)
    if kind != np.uint8 or len(shape) != 4 or shape[3] != 3 or transposed:
        raise UserError(f"reference: {path.name} holds {kind} {list(shape)}, not uint8 pictures [N, H, W, 3].")
    if not 0 < shape[0] <= _MOST or not all(0 < n <= _LONGEST_SIDE for n in shape[1:3]):
        raise UserError(f"reference: {path.name} holds pictures {list(shape)}; that is none or too many.")
    return shape


def _array(file: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    """The statistics of that name, checked before they are read."""
    with file.open(f"{name}.npy") as stream:
        shape, transposed, kind = _read_header(stream, path)
        wanted = {"mu": 1, "sigma": 2}[name]
        if len(shape) != wanted or not 0 < max(shape) <= _MOST_FEATURES or len(set(shape)) != 1:
            form = "[D]" if wanted == 1 else "[D, D]"
            raise UserError(f"reference: {name} in {path.name} has the shape {list(shape)}; it should be {form}.")
        if kind not in (np.float32, np.float64):
            raise UserError(f"reference: {name} in {path.name} is {kind}; it should be float32 or float64.")
        count = int(np.prod(shape))
        data = stream.read(count * kind.itemsize)
        if len(data) != count * kind.itemsize:
            raise UserError(f"reference: {path.name} ends early; copy it again.")
        return np.frombuffer(data, kind).reshape(shape, order="F" if transposed else "C")


def _picture(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """A picture file as uint8 [H, W, 3].

    Raises:
        UserError: it cannot be read, or has another size.
    """
    try:
        with Image.open(path) as image:
            if max(image.size) > _LONGEST_SIDE:
                raise UserError(f"reference: {path.name} is larger than {_LONGEST_SIDE} pixels.")
            found = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as e:
        raise UserError(f"reference: {path.name} cannot be read ({first_line(e)}).") from None
    if size is not None and found.shape[:2] != size:
        (h, w), (wanted_h, wanted_w) = found.shape[:2], size
        raise UserError(
            f"reference: {path.name} has {w} x {h} pixels, others {wanted_w} x {wanted_h}; give pictures of one size."
        )
    return found


def _digest(path: Path, files: tuple[Path, ...] = ()) -> str:
    """32 hexadecimal digits of the content of a file, or of the names and contents of a folder's files."""
    state = hashlib.sha256()
    for file in files or (path,):
        if files:
            state.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 20):
                state.update(chunk)
    return state.hexdigest()[:32]
