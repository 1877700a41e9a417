"""The store of a sweep in nodes: a folder with a PNG file a cell, one image below the other, and its report in the
metadata.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import UserError
from ..reports.drawing import check_batch
from ..reports.exchange import KEY, OtherFormat, add_runs, described, read_runs
from ..reports.record import Report
from .folder import Folder


class CellStore:
    """The folder of a sweep's cells. It is created with the first cell."""

    def __init__(self, folder: Path):
        self.folder = Folder(folder, "folder")

    @property
    def name(self) -> str:
        """Name of the folder."""
        return Path(self.folder.root).name

    @property
    def exists(self) -> bool:
        """Whether the folder is there."""
        return Path(self.folder.root).is_dir()

    def path(self, name: str) -> Path:
        """The file of a cell."""
        return Path(self.folder.root) / f"{name}.png"

    def write(self, name: str, images: np.ndarray, report: Report) -> None:
        """Write a cell, uint8 [N, H, W, 3].

        Raises:
            UserError: the file cannot be written. It appears complete, or not at all.
        """
        n, h, w, _ = check_batch(images, "images").shape
        column = images.reshape(n * h, w, 3)

        metadata: dict[str, Any] = {}
        add_runs(metadata, described([report]))
        about = PngInfo()
        about.add_text(KEY, json.dumps(metadata[KEY]))

        out = io.BytesIO()
        Image.fromarray(column).save(out, "PNG", pnginfo=about, compress_level=4)
        self.folder.write(f"{name}.png", out.getvalue())

    def check(self, name: str) -> None:
        """Check that a cell can be written, before it is sampled; raises as :meth:`write`."""
        if self.path(name).is_dir():
            raise UserError(f"folder: {name}.png in {self.folder.address} is a folder; rename it.")
        self.folder.check("folder")
        self.folder.remove_made()  # a cell that is refused leaves no folder

    def read(self, name: str) -> tuple[np.ndarray, Report] | None:
        """Images and report of a cell; None if it is missing or damaged, so that it is made again.

        Raises:
            UserError: the file holds a report of another format, which a newer version wrote and this one must not
                overwrite.
        """
        try:
            saved = read_runs(self.path(name))
        except OtherFormat:
            raise UserError(
                f"folder: {name}.png in {self.folder.address} was written by another version of FastAR; choose another "
                "folder."
            ) from None
        except UserError:
            return None

        report = saved.reports[0]
        column = np.asarray(saved.image)
        if len(column) % report.images:
            return None

        height = len(column) // report.images
        return column.reshape(report.images, height, *column.shape[1:]), report


def completed(
    store: CellStore, names: Sequence[str], make: Callable[[int], tuple[np.ndarray, Report]]
) -> Iterator[tuple[int, np.ndarray, Report]]:
    """Index, images and report without maps of every cell in order; one cell is in memory at a time.

    What is on disk under its name is read; the others are made by ``make``, which takes an index, and written.
    """
    for i, name in enumerate(names):
        found = store.read(name)
        if found is not None:
            yield i, *found
            continue

        store.check(name)
        images, report = make(i)
        bare = replace(report, maps={}, similarity=None)
        store.write(name, images, bare)
        yield i, images, bare
