"""The store of a sweep in nodes: a folder with a PNG file a cell, one image below the other, and its report in the
metadata.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import UserError
from ..reports.exchange import KEY, OtherFormat, add_runs, described, read_runs
from ..reports.files import FULL, replace_file, writable
from ..reports.record import Report


class CellStore:
    """The folder of a sweep's cells. It is created with the first cell.

    Raises:
        UserError: a file has its name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._in_use = False  # whether there were cells in it when it was last used
        if folder.exists() and not folder.is_dir():
            raise UserError(f"folder: {folder} is a file; name a folder.")

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def exists(self) -> bool:
        """Whether the folder is there."""
        return self.folder.is_dir()

    def path(self, name: str) -> Path:
        """The file of a cell."""
        return self.folder / f"{name}.png"

    def check(self, name: str) -> None:
        """Check that a cell can be written, before it is sampled; raises as :meth:`write`."""
        if self.path(name).is_dir():
            raise UserError(
                f"folder: {name}.png in {self.folder} is a folder, but an image must get this name; "
                "give this folder a different name."
            )
        self._expect_still_there()
        with suppress(OSError):  # which writable() reports
            self._in_use = self.exists and any(self.folder.iterdir())
        writable(self.folder, "folder")

    def write(self, name: str, images: np.ndarray, report: Report) -> None:
        """Write a cell, uint8 [N, H, W, 3].

        Raises:
            UserError: the file cannot be written. It appears complete, or not at all.
        """
        n, h, w, _ = images.shape
        column = images.reshape(n * h, w, 3)

        metadata: dict[str, Any] = {}
        add_runs(metadata, described([report]))
        about = PngInfo()
        about.add_text(KEY, json.dumps(metadata[KEY]))

        out = io.BytesIO()
        Image.fromarray(column).save(out, "PNG", pnginfo=about, compress_level=4)

        self._expect_still_there()
        try:
            replace_file(self.path(name), out.getvalue())
        except OSError as e:
            remedy = "delete files there" if e.errno in FULL else "make it writable"
            kept = "; what is finished is kept" if self._in_use else ""
            raise UserError(
                f"folder: {self.folder} cannot be written to ({e.strerror or e}); {remedy} and run again{kept}."
            ) from None
        self._in_use = True

    def _expect_still_there(self) -> None:
        """Check that a folder that is in use was not moved: it would be made anew, without what is finished."""
        if self._in_use and not self.exists:
            raise UserError(
                f"folder: {self.folder} was moved or removed while the sweep ran; move the folder back and run the "
                "sweep again."
            )

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
                f"folder: {name}.png in {self.folder} was written by a different version of FastAR; choose a different "
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
        # As it was written, so that a table of this run and of a later one show the same rounded seconds.
        yield i, *(store.read(name) or (images, bare))
