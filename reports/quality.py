"""Distance of an image from its baseline's: PSNR, SSIM, equality, and the difference as an image.

PSNR and SSIM compare images pixel by pixel. They are defined only between runs that should draw the same image: one
model, one seed, one prompt, one edit, one size, one set of steps. For methods that keep the distribution of images but
not the image, or that are meant to give a different image, a word replaces the numbers.

Source of SSIM: Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment: from error visibility to structural
similarity", IEEE TIP 2004: Gaussian window of 11 x 11 pixels with standard deviation 1.5, K1 = 0.01, K2 = 0.03, windows
inside the image only, mean over the colour channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reading import NOT_READ, within
from .table import figure

PEAK = 255.0
WINDOW = 11
SIGMA = 1.5
K1 = 0.01
K2 = 0.03
GAIN = 4  # of difference images
MOST_PSNR = 100.0  # in dB; that of an equal image beside others, and above that of any other
LOW = 0.1  # the low quantile of several images

IDENTICAL = "identical"
DISTRIBUTION = "same distribution"
OTHER_IMAGE = "different image"
OTHER_SEED = "other seed"
OTHER_MODEL = "other model"
OTHER_CONDITION = "other prompt"
OTHER_EDIT = "other edit"
OTHER_SIZE = "other size"
# The word of reports that were saved before it was "different image".
SAVED_AS = {"another image": OTHER_IMAGE}
# Words in place of figures, with their meaning.
WORDS = {
    IDENTICAL: "every pixel is equal to the baseline's",
    DISTRIBUTION: "a different image, sampled from exactly the same distribution",
    OTHER_IMAGE: "not compared, because the method or its settings (steps, order, guidance, temperature) are meant to "
    "give a different image",
    OTHER_SEED: "not compared, because the seeds differ",
    OTHER_MODEL: "not compared, because the models differ",
    OTHER_CONDITION: "not compared, because the labels or prompts differ",
    OTHER_EDIT: "not compared, because one image is edited and the other is not, or their masks or original images "
    "differ",
    OTHER_SIZE: "not compared, because the image sizes or batch sizes differ",
}


@dataclass(frozen=True)
class Quality:
    """Distance of a batch of images from its baseline's."""

    psnr: float | None = None  # in dB, median of the images; None if they are equal or not compared
    # At most 1, mean over the batch; None if not compared or a side is below 11 pixels.
    ssim: float | None = field(default=None, metadata=within(-1, 1))
    word: str = ""  # one of WORDS, "" where the figures apply
    psnr_low: float | None = None  # in dB, below which one image in ten is; None for one image
    # Of every image, at most 100; () of a saved report.
    psnrs: tuple[float, ...] = field(default=(), compare=False, metadata=NOT_READ)

    @property
    def identical(self) -> bool:
        """Whether all pixels are equal."""
        return self.word == IDENTICAL

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form (docs/report.md)."""
        out: dict[str, Any] = {"identical": self.identical}
        if self.psnr is not None:
            out["psnr"] = round(self.psnr, 4)
        if self.psnr_low is not None:
            out["psnr_low"] = round(self.psnr_low, 4)
        if self.ssim is not None:
            most = 1.0 if self.identical else 0.999999
            out["ssim"] = min(round(self.ssim, 6), most)
        if self.word:
            out["word"] = self.word

        return out

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) lines for a cell of a grid."""
        if self.word:
            return [("image", self.word)]

        figures = zip(("PSNR", "SSIM"), closeness(self), strict=True)
        return [(name, text) for name, text in figures if text]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 arrays of one shape; infinite if they are equal."""
    errors = [np.square(x.astype(np.float64) - y).mean() for x, y in zip(a, b, strict=True)]
    error = float(np.mean(errors))
    if not error:
        return math.inf

    return 10 * math.log10(PEAK**2 / error)


def psnr_figures(values: Sequence[float]) -> tuple[float, float | None]:
    """Of the PSNR of at least one image the median, and the value below which one image in ten is; None for one."""
    low = float(np.quantile(values, LOW)) if len(values) > 1 else None
    return float(np.median(values)), low


def ssim(a: np.ndarray, b: np.ndarray) -> float | None:
    """Structural similarity of two uint8 batches [N, H, W, 3], mean over the batch.

    None if a side is below 11 pixels.
    """
    if min(a.shape[1:3]) < WINDOW:
        return None

    # One channel at a time: a window's products of an image of 1024 x 1024 pixels take hundreds of megabytes in fp64.
    values = []
    for x, y in zip(a, b, strict=True):
        for channel in range(x.shape[-1]):
            values.append(_ssim(_channel(x, channel), _channel(y, channel)))

    return float(np.mean(values))


def _channel(image: np.ndarray, c: int) -> Tensor:
    """One channel of uint8 [H, W, C] as fp64 [1, 1, H, W]."""
    return torch.from_numpy(image[..., c].astype(np.float64))[None, None]


def _ssim(x: Tensor, y: Tensor) -> float:
    """Equation 13 of the paper at every window of a channel of two images [1, 1, H, W], averaged."""
    mean_x = _smooth(x)
    mean_y = _smooth(y)
    variance_x = _smooth(x * x) - mean_x * mean_x
    variance_y = _smooth(y * y) - mean_y * mean_y
    covariance = _smooth(x * y) - mean_x * mean_y

    c1 = (K1 * PEAK) ** 2
    c2 = (K2 * PEAK) ** 2
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    below = (mean_x * mean_x + mean_y * mean_y + c1) * (variance_x + variance_y + c2)

    return float((above / below).mean())


def _smooth(x: Tensor) -> Tensor:
    """Gaussian mean of every window; [1, 1, H, W] to [1, 1, H - 10, W - 10]."""
    return _smooth_along(_smooth_along(x, -2), -1)


def _smooth_along(x: Tensor, dim: int) -> Tensor:
    """Gaussian mean along one dimension, as a sum of shifted slices.

    A convolution in fp64 copies its input 11 times.
    """
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-offsets.square() / (2 * SIGMA**2))
    first, *others = (weights / weights.sum()).tolist()

    length = x.shape[dim] - WINDOW + 1
    out = x.narrow(dim, 0, length) * first
    for i, weight in enumerate(others, 1):
        out.add_(x.narrow(dim, i, length), alpha=weight)

    return out


def difference(images: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Absolute difference of two uint8 batches of one shape, multiplied by 4 and cut at 255; black is equal."""
    out = np.empty_like(images)

    for i, (a, b) in enumerate(zip(images, baseline, strict=True)):
        out[i] = np.minimum(np.abs(a.astype(np.int16) - b) * GAIN, 255)

    return out


def measure(images: np.ndarray, baseline: np.ndarray, word: str = "") -> Quality:
    """Distance of two batches, uint8 [N, H, W, 3].

    ``word`` takes the place of the figures unless the images are equal.
    """
    if images.shape != baseline.shape:
        return Quality(word=OTHER_SIZE)
    if np.array_equal(images, baseline):
        return Quality(None, 1.0, IDENTICAL)
    if word:
        return Quality(word=word)

    values = tuple(min(MOST_PSNR, psnr(a[None], b[None])) for a, b in zip(images, baseline, strict=True))
    middle, low = psnr_figures(values)
    return Quality(middle, ssim(images, baseline), psnr_low=low, psnrs=values)


def closeness(found: Any) -> list[str]:
    """PSNR and SSIM of a :class:`Quality` or of a point of a sweep as text; "" is unknown.

    A word takes the place of the first. Of several images PSNR is "39.3 dB (low 16.6)".
    """
    if found is None:
        return ["", ""]
    if found.word:
        return [found.word, ""]

    ssim = figure(found.ssim, ".3f")
    if ssim == "1.000":  # the images are not equal
        ssim = "0.999"

    low = figure(found.psnr_low, ".1f")
    psnr = figure(found.psnr, ".1f", " dB")
    return [f"{psnr} (low {low})" if low else psnr, ssim]


def explain_quality(found: Sequence[Quality | None]) -> str:
    """One line that explains the figures and words of these cells; "" if there are none."""
    known = [q for q in found if q is not None]
    words = {q.word for q in known}

    parts = []
    if any(q.psnr is not None for q in known):
        parts.append("PSNR and SSIM: closeness to the baseline's image, higher is closer, SSIM 1 is identical")
    if any(q.psnr_low is not None for q in known):
        parts.append(
            "for several images, PSNR is the median, and one image in ten has a PSNR below the value marked low"
        )
    for word, meaning in WORDS.items():
        if word in words:
            parts.append(f"{word}: {meaning}")

    return "; ".join(parts)
