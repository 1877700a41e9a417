"""The demo's judge as a measure of the command evaluate: class,
scene, whole and Frechet distance of ``training/quality.py``.
"""

import numpy as np

from ..errors import UserError
from . import files
from .training import picture_book
from .training.judge import load_judge, read
from .training.quality import judged, shrunk
from .training.recipes import RESOLUTION

# Seed of the real scenes, as in the ablation tables.
SEED = 2


class PictureBookJudge:
    """The judge of the picture book. Raises UserError if its file is missing."""

    def __init__(self) -> None:
        path = files.checkpoint("judge")
        if not path.is_file():
            raise UserError(f"judge: {path.name} is missing; make it with train-demo --only judge.")
        self._judge, self._tolerance = load_judge(path)
        self._real: dict[tuple[int, int], np.ndarray] = {}

    def judges(self, size: tuple[int, int], labels: np.ndarray) -> bool:
        """Whether images of that height and width with these labels
        are of the picture book: squares of 64 pixels or a multiple.
        """
        square = size[0] == size[1] and size[0] % RESOLUTION == 0
        return bool(square and labels.dtype == np.int64 and (labels < len(picture_book.LABELS)).all())

    def read(self, pictures: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Features [N, 64] of uint8 [N, H, H, 3] of class ids [N],
        and by measure whether each image fulfils it, bool [N].
        """
        features, found = judged(self._judge, self._tolerance, shrunk(pictures), labels)
        return features, {f"judge-{name}": flags for name, flags in found.items()}

    def reference(self, images: int, side: int) -> np.ndarray:
        """Features [images, 64] of real images of all classes in turn."""
        if (images, side) not in self._real:
            labels = np.arange(images) % len(picture_book.LABELS)
            rgb, _ = picture_book.render(picture_book.scenes(SEED, images, labels=labels), side)
            self._real = {(images, side): read(self._judge, shrunk(rgb)).features}
        return self._real[images, side]
