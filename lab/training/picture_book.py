"""The picture book: an unlimited, seeded set of small coloured scenes with captions and known parameters.

A scene has one of ten objects, five colours, three places, two sizes, three times of day
and three variants. An image is a pure function of ``(seed, index)`` on every platform:
the parameters come from a counter-based hash. A scene renders at any resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from .drawings import COLOURS, DRAW, RGB, Canvas

LABELS = ("sunset", "mountains", "flower", "fish", "house", "tree", "planet", "boat", "balloon", "cat")
PLACES = ("on the left", "in the middle", "on the right")
SIZES = ("small", "large")
TIMES = ("by day", "at sunset", "at night")
PARTS = 3
# Numbers of values of the parameters.
VALUES = {"label": len(LABELS), "colour": len(COLOURS), "place": len(PLACES), "size": len(SIZES), "time": len(TIMES)}
VALUES |= {"parts": PARTS}
# Distance between places, scale of each size, and the largest random offset of both (half a pixel of 64).
PLACE_STEP = 0.34
SCALES = (0.82, 1.15)
JITTER = 0.02

# Colours of a sunset.
_SUN_COLOURS = np.array([COLOURS.index("red"), COLOURS.index("yellow")])


@dataclass(frozen=True)
class Scenes:
    """Parameters of N images: indices into the lists above, int64 [N]; place, size and position of clouds, float32 [N].

    ``parts`` is the object's variant; x and y are its centre in -1..1, ``scale`` its size, around 1.
    """

    label: np.ndarray
    colour: np.ndarray
    place: np.ndarray
    size: np.ndarray
    time: np.ndarray
    parts: np.ndarray
    x: np.ndarray
    y: np.ndarray
    scale: np.ndarray
    drift: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: slice | np.ndarray | list[int]) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def captions(self) -> list[str]:
        """One caption per image, for example ``a small red boat on the left at sunset``."""
        lines = []
        parameters = (self.label, self.colour, self.place, self.size, self.time)

        for label, colour, place, size, time in zip(*parameters, strict=True):
            name = LABELS[label]
            article = "" if name == "mountains" else "a "
            when = "" if name == "sunset" else f" {TIMES[time]}"
            lines.append(f"{article}{SIZES[size]} {COLOURS[colour]} {name} {PLACES[place]}{when}")

        return lines


def _uniform(seed: int, index: np.ndarray, field: int) -> np.ndarray:
    """Uniform float64 in [0, 1) from (seed, index, field): the splitmix64 finaliser used as a counter-based hash."""
    with np.errstate(over="ignore"):
        key = np.uint64((seed * 0x9E3779B97F4A7C15 + field * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF)
        h = index.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
        h ^= h >> np.uint64(31)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scenes(seed: int, count: int, start: int = 0, labels: Sequence[int] | None = None) -> Scenes:
    """Parameters of the images ``start .. start + count - 1`` of the
    book ``seed``; ``labels``: of each image, None for random ones.
    """
    index = np.arange(start, start + count)

    def pick(field: int, n: int) -> np.ndarray:
        return np.minimum((_uniform(seed, index, field) * n).astype(np.int64), n - 1)

    def spread(field: int) -> np.ndarray:
        return (_uniform(seed, index, field) * 2 - 1).astype(np.float32)

    label = pick(0, len(LABELS)) if labels is None else np.asarray(labels, dtype=np.int64)
    if label.shape != (count,):
        raise ValueError(f"labels: {label.shape[0]} given for {count} images; give one per image.")
    colour, place, size, time, parts = pick(1, len(COLOURS)), pick(2, 3), pick(3, 2), pick(4, 3), pick(5, PARTS)
    sun = label == 0
    colour = np.where(sun, _SUN_COLOURS[pick(1, len(_SUN_COLOURS))], colour)
    time = np.where(sun, 1, time)
    x = (place - 1) * PLACE_STEP + spread(6) * JITTER
    scale = np.where(size == 1, SCALES[1], SCALES[0]) + spread(7) * JITTER
    y, drift = spread(8) * JITTER, _uniform(seed, index, 9)
    across, enlarged, drifted = (values.astype(np.float32) for values in (x, scale, drift))

    return Scenes(label, colour, place, size, time, parts, across, y, enlarged, drifted)


def render(s: Scenes, resolution: int = 64, objects: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, resolution, resolution, 3] of N scenes, and the coverage of their objects, uint8 of 0 to 255.

    ``resolution`` is 8 or more; ``objects`` False renders the background alone.
    """
    if resolution < 8:
        raise ValueError(f"resolution: {resolution} is too small; use 8 or more.")
    rgb = np.empty((len(s), resolution, resolution, 3), np.uint8)
    mask = np.empty((len(s), resolution, resolution), np.uint8)
    chunk = max(1, (1 << 19) // resolution**2)

    for label, draw in enumerate(DRAW):
        rows = np.flatnonzero(s.label == label)
        for at in range(0, len(rows), chunk):
            part = rows[at : at + chunk]
            c = Canvas(s[part], resolution, objects)
            draw(c, RGB[c.s.colour])
            rgb[part] = (np.clip(c.rgb, 0, 1) * 255 + 0.5).astype(np.uint8)
            mask[part] = (np.clip(c.mask, 0, 1) * 255 + 0.5).astype(np.uint8)

    return rgb, mask
