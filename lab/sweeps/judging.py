"""The demo's judge as measures of the command evaluate: class, scene, prompt, whole, variety and Frechet distance.

``training/quality.py`` computes them. The judge reads images averaged to its 64 pixels, so that figures of images of
all sizes compare.
"""

from typing import NamedTuple

import numpy as np

from ...errors import UserError
from .. import files
from ..training import picture_book
from ..training.captions import fulfilling, requests
from ..training.judge import load_judge, read
from ..training.quality import judged, scene_numbers, shrunk
from ..training.recipes import RESOLUTION

# Seed of the real scenes that images are compared with.
SEED = 2
# Measures of images of labels, and of images of prompts.
_OF_ALL = ("judge-whole", "judge-distinct", "judge-nearest", "judge-frechet")
OF_LABELS = ("judge-class", "judge-scene", *_OF_ALL)
OF_PROMPTS = ("judge-class", "judge-prompt", *_OF_ALL)


class Reading(NamedTuple):
    """What the judge reads in N images."""

    features: np.ndarray  # fp32 [N, 64]
    flags: dict[str, np.ndarray]  # by measure, whether each image fulfils it, bool [N]
    scenes: np.ndarray  # int64 [N], equal for images of equal scenes
    small: np.ndarray  # the images as the judge sees them, uint8 [N, 64, 64, 3]


class PictureBookJudge:
    """A judge of the picture book. Raises UserError if its file is missing."""

    def __init__(self, name: str = "judge") -> None:
        path = files.checkpoint(name)
        if not path.is_file():
            raise UserError(f"judge: {path.name} is missing; create this file with train-demo --only {name}.")
        self._judge, self._tolerance = load_judge(path)

        # Features of real images, by what they show and their size.
        self._real: dict[tuple[tuple[int | str, ...], int], np.ndarray] = {}

    def measures(self, size: tuple[int, int], labels: np.ndarray) -> tuple[str, ...]:
        """The measures of images of that height and width with these labels or prompts.

        There are some for squares of 64 pixels or a multiple that show classes of the picture book, or what one of its
        captions asks for.
        """
        height, width = size
        if height != width or height % RESOLUTION:
            return ()

        if labels.dtype == np.int64:
            return OF_LABELS if (labels < len(picture_book.LABELS)).all() else ()
        return OF_PROMPTS if requests(labels.tolist()) is not None else ()

    def read(self, pictures: np.ndarray, labels: np.ndarray) -> Reading:
        """Read images.

        Args:
            pictures: uint8 [N, H, H, 3].
            labels: class ids, int64 [N], or prompts, text [N].
        """
        rgb = shrunk(pictures)
        verdict = read(self._judge, rgb)

        if labels.dtype == np.int64:
            found = judged(verdict, self._tolerance, rgb, labels)
        else:
            wanted = requests(labels.tolist())
            assert wanted is not None, "measures() has checked the prompts"
            right = wanted.fulfilled(verdict.scenes)
            found = {
                "class": right["label"],
                "prompt": np.logical_and.reduce(list(right.values())),
                "whole": verdict.whole > 0.5,
            }

        flags = {f"judge-{name}": values for name, values in found.items()}
        return Reading(verdict.features, flags, scene_numbers(verdict.scenes), rgb)

    def reference(self, labels: np.ndarray, side: int) -> np.ndarray:
        """Features [N, 64] of as many real images with these labels or prompts."""
        key = (tuple(labels.tolist()), side)
        if key not in self._real:
            if labels.dtype == np.int64:
                scenes = picture_book.scenes(SEED, len(labels), labels=labels)
            else:
                wanted = requests(labels.tolist())
                assert wanted is not None, "measures() has checked the prompts"
                scenes = fulfilling(wanted, SEED)

            rgb, _ = picture_book.render(scenes, side)
            self._real = {key: read(self._judge, shrunk(rgb)).features}

        return self._real[key]
