"""Drawings of the picture book: signed distance functions with analytic anti-aliasing, one function per label."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

COLOURS = ("red", "yellow", "green", "blue", "white")
# Far apart, so that a mixture of two is recognisable.
RGB = np.array(
    [(0.89, 0.18, 0.18), (0.99, 0.86, 0.24), (0.24, 0.66, 0.30), (0.18, 0.40, 0.88), (0.97, 0.96, 0.93)], np.float32
)
_RED, _YELLOW, _WHITE = COLOURS.index("red"), COLOURS.index("yellow"), COLOURS.index("white")

_Field = np.ndarray  # float32 [n, H, W]


class Canvas:
    """RGB images [n, H, W, 3] and the coverage of their objects
    [n, H, W], float32 in 0..1, of n ``picture_book.Scenes``.
    """

    def __init__(self, s: Any, resolution: int, objects: bool = True):
        self.objects = objects
        step = 2.0 / resolution
        axis = (np.arange(resolution, dtype=np.float32) + 0.5) * step - 1
        self.s, self.pixel = s, np.float32(step)
        self.x = np.broadcast_to(axis[None, None, :], (len(s), resolution, resolution))
        self.y = np.broadcast_to(-axis[None, :, None], (len(s), resolution, resolution))
        self.rgb = np.zeros((len(s), resolution, resolution, 3), np.float32)
        self.mask = np.zeros((len(s), resolution, resolution), np.float32)

        # Coordinates of the object: the origin is its centre, the unit its scale.
        scale = s.scale[:, None, None]
        self.u, self.v = (self.x - s.x[:, None, None]) / scale, (self.y - s.y[:, None, None]) / scale
        self.unit = scale

    def paint(
        self, distance: _Field, colour: np.ndarray, opacity: np.ndarray | float = 1.0, is_object: bool = False
    ) -> None:
        """Fill the area where ``distance`` (image units) is negative with ``colour``, [3] or [n, 3]."""
        if is_object and not self.objects:
            return
        cover = np.clip(0.5 - distance / self.pixel, 0, 1)
        cover *= np.asarray(opacity, np.float32).reshape(-1, 1, 1)
        colour = np.asarray(colour, np.float32)
        self.rgb += cover[..., None] * (colour.reshape(-1, 1, 1, 3) - self.rgb)
        if is_object:
            np.maximum(self.mask, cover, out=self.mask)

    def part(self, distance: _Field, colour: np.ndarray, when: np.ndarray | float = 1.0, line: float = 0.045) -> None:
        """Draw a part of the object with a dark outline; ``distance`` is in object units."""
        distance = distance * self.unit
        ink = np.asarray(colour, np.float32) * 0.32
        if line:
            self.paint(distance - line, ink, when, is_object=True)
        self.paint(distance, colour, when, is_object=True)


def _disc(u: _Field, v: _Field, cx: float, cy: float, r: float) -> _Field:
    return np.hypot(u - cx, v - cy) - r


def _oval(u: _Field, v: _Field, cx: float, cy: float, rx: float, ry: float) -> _Field:
    return (np.hypot((u - cx) / rx, (v - cy) / ry) - 1) * min(rx, ry)


def _box(u: _Field, v: _Field, cx: float, cy: float, hx: float, hy: float) -> _Field:
    return np.maximum(np.abs(u - cx) - hx, np.abs(v - cy) - hy)


def _convex(u: _Field, v: _Field, points: Sequence[tuple[float, float]]) -> _Field:
    """Convex polygon, corners in either direction: the maximum of the half-plane distances of its edges."""
    area = sum(ax * by - ay * bx for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True))
    out: _Field | None = None

    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        nx, ny = (by - ay, ax - bx) if area > 0 else (ay - by, bx - ax)
        edge = ((u - ax) * nx + (v - ay) * ny) / np.hypot(nx, ny)
        out = edge if out is None else np.maximum(out, edge)

    assert out is not None
    return out


def _is(values: np.ndarray, *options: int) -> np.ndarray:
    return np.isin(values, options).astype(np.float32)


# Colours by time of day; gradients from top to bottom.
_SKY = np.array(
    [
        [(0.40, 0.68, 0.95), (0.80, 0.92, 0.99)], [(0.55, 0.32, 0.58), (0.99, 0.70, 0.45)],
        [(0.05, 0.07, 0.22), (0.18, 0.22, 0.46)],
    ], np.float32,
)  # fmt: skip
_MEADOW = np.array([(0.52, 0.78, 0.38), (0.50, 0.50, 0.26), (0.12, 0.26, 0.24)], np.float32)
_SEA = np.array([(0.14, 0.50, 0.72), (0.46, 0.30, 0.52), (0.08, 0.14, 0.34)], np.float32)
_DEEP = np.array(
    [
        [(0.45, 0.86, 0.90), (0.08, 0.48, 0.66)], [(0.66, 0.50, 0.72), (0.28, 0.22, 0.50)],
        [(0.12, 0.28, 0.46), (0.02, 0.08, 0.20)],
    ], np.float32,
)  # fmt: skip
_SPACE = np.array(
    [
        [(0.16, 0.22, 0.46), (0.28, 0.36, 0.62)], [(0.24, 0.10, 0.26), (0.44, 0.18, 0.32)],
        [(0.02, 0.02, 0.07), (0.07, 0.06, 0.16)],
    ], np.float32,
)  # fmt: skip
_STARS = (
    (-0.82, 0.78), (-0.42, 0.52), (-0.10, 0.86), (0.34, 0.66), (0.72, 0.84), (0.90, 0.40), (-0.90, 0.26), (0.12, 0.38),
)  # fmt: skip
_LOW_STARS = ((-0.7, -0.5), (-0.25, -0.82), (0.4, -0.66), (0.85, -0.3), (0.8, -0.9), (-0.95, -0.9))


def _gradient(c: Canvas, pair: np.ndarray) -> None:
    t = ((c.y + 1) / 2)[..., None]
    pair = pair[c.s.time][:, :, None, None, :]
    c.rgb[:] = pair[:, 0] * t + pair[:, 1] * (1 - t)


def _stars(c: Canvas, spots: Sequence[tuple[float, float]], when: np.ndarray) -> None:
    shift = (c.s.drift[:, None, None] - 0.5) * 0.3
    for x, y in spots:
        c.paint(_disc(c.x, c.y, x + shift, y, 0.028), np.array((1.0, 0.97, 0.80)), when)


def _land(c: Canvas, horizon: float = -0.35, sea: bool = False) -> None:
    _gradient(c, _SKY)
    drift = c.s.drift[:, None, None]
    _stars(c, _STARS, _is(c.s.time, 2))
    cloud_x = drift * 1.4 - 0.7
    cloud = np.minimum(_oval(c.x, c.y, cloud_x, 0.72, 0.26, 0.09), _oval(c.x, c.y, cloud_x + 0.1, 0.78, 0.14, 0.10))
    c.paint(cloud, np.array((1.0, 0.98, 0.96)), 0.85 * _is(c.s.time, 0, 1))
    if sea:
        c.paint(c.y - horizon, _SEA[c.s.time])
        for y, w in ((-0.55, 0.30), (-0.75, 0.42), (-0.92, 0.30)):
            c.paint(_oval(c.x, c.y, cloud_x * (1.0 if y == -0.75 else -0.8), y, w, 0.022), _SEA[c.s.time] * 0.6 + 0.4)
        return

    hill = 0.10 * np.sin(c.x * 2.6 + drift * 6.28)
    c.paint((c.y - horizon - hill) * 0.95, _MEADOW[c.s.time])
    c.paint((c.y - horizon + 0.28 + 0.7 * hill) * 0.97, _MEADOW[c.s.time] * 0.86)


def _sunset(c: Canvas, ink: np.ndarray) -> None:
    _land(c, -0.30, sea=True)
    v = c.v + 0.12
    c.part(_disc(c.u, v, 0, 0, 0.42), ink, line=0.0)
    c.part(_disc(c.u, v, 0, 0, 0.30), ink * 0.5 + 0.5, line=0.0)
    sea = c.y + 0.30
    c.paint(sea, _SEA[c.s.time])
    c.mask *= np.clip(0.5 + sea / c.pixel, 0, 1)
    for i, (y, w) in enumerate(((-0.42, 0.34), (-0.58, 0.26), (-0.74, 0.18), (-0.90, 0.10))):
        c.paint(_oval(c.x - c.s.x[:, None, None], c.y, 0, y, w, 0.05), ink, 0.9, is_object=i < 2)

    for i, bx in enumerate((-0.62, 0.62)):
        when = _is(c.s.parts, i + 1, 2)
        for side in (-1, 1):
            wing = _box(c.x - bx, c.y - 0.52 - 0.5 * np.abs(c.x - bx), side * 0.085, 0, 0.085, 0.028)
            c.paint(wing, np.array((0.15, 0.10, 0.20)), when)


def _mountains(c: Canvas, ink: np.ndarray) -> None:
    _land(c, -0.42)
    v = c.v + 0.10
    peaks = ((0.42, 0.05, 0.36, _is(c.s.parts, 1, 2)), (-0.42, -0.02, 0.34, _is(c.s.parts, 2)), (0.0, 0.42, 0.50, 1.0))

    for x, top, half, when in peaks:
        shade = ink if top == 0.42 else ink * 0.8
        c.part(_convex(c.u, v, ((x - half, -0.40), (x + half, -0.40), (x, top))), shade, when)
        cap = 0.34
        edge, low = half * cap, top - (top + 0.4) * cap
        snow = _convex(c.u, v, ((x - edge, low), (x + edge, low), (x, top)))
        c.part(snow, np.array((0.99, 0.99, 1.0)), when, line=0.0)

    hill = 0.06 * np.sin(c.x * 3.1 + c.s.drift[:, None, None] * 5)
    c.paint(c.y + 0.37 - hill, _MEADOW[c.s.time])


def _flower(c: Canvas, ink: np.ndarray) -> None:
    _land(c)
    green = np.array((0.20, 0.55, 0.24))
    v = c.v - 0.12
    c.part(_box(c.u, v, 0, -0.52, 0.035, 0.40), green)
    for side in (-1, 1):
        c.part(_oval(c.u * 0.8 - 0.6 * side * v, v * 0.8 + 0.6 * side * c.u, side * 0.48, -0.28, 0.17, 0.075), green)

    for i, petals in enumerate((5, 6, 8)):
        when = _is(c.s.parts, i)
        for j in range(petals):
            a = 2 * np.pi * j / petals + np.pi / 2
            c.part(_disc(c.u, v, 0.25 * np.cos(a), 0.25 * np.sin(a), 0.15 if petals < 8 else 0.12), ink, when)

    c.part(_disc(c.u, v, 0, 0, 0.15), np.where(c.s.colour[:, None] == _YELLOW, (0.75, 0.40, 0.12), (1.0, 0.84, 0.25)))


def _fish(c: Canvas, ink: np.ndarray) -> None:
    _gradient(c, _DEEP)
    drift = c.s.drift[:, None, None]
    sand = np.array((0.86, 0.76, 0.52)) * np.array((1, 0.85, 0.5))[c.s.time][:, None]
    c.paint(c.y + 0.82 + 0.05 * np.sin(c.x * 4 + drift * 6), sand)

    for wx, wh in ((-0.78, 0.55), (0.74, 0.42)):
        weed = np.abs(c.x - wx - 0.05 * np.sin(c.y * 9 + drift * 6)) - 0.05
        c.paint(np.maximum(weed, c.y + 0.95 - wh), np.array((0.10, 0.44, 0.30)))

    for i, (bx, by) in enumerate(((0.55, 0.45), (0.62, 0.68), (0.48, 0.86))):
        bubble = np.abs(_disc(c.x, c.y, bx * (2 * drift - 1), by, 0.05 + 0.012 * i)) - 0.014
        c.paint(bubble, np.array((0.92, 0.98, 1.0)))

    c.part(_convex(c.u, c.v, ((0.30, 0.0), (0.60, -0.26), (0.60, 0.26))), ink * 0.85)
    c.part(_convex(c.u, c.v, ((-0.12, 0.18), (0.20, 0.18), (0.16, 0.40))), ink * 0.85)
    body = _oval(c.u, c.v, 0, 0, 0.44, 0.26)
    c.part(body, ink)

    for i, x in enumerate((0.02, 0.18)):
        stripe = np.maximum(np.abs(c.u - x) - 0.045, body)
        c.part(stripe, ink * 0.45 + 0.5 * (c.s.colour[:, None] != _WHITE), _is(c.s.parts, i + 1, 2), line=0.0)

    c.part(_disc(c.u, c.v, -0.24, 0.06, 0.075), np.array((1.0, 1.0, 1.0)), line=0.0)
    c.part(_disc(c.u, c.v, -0.26, 0.06, 0.04), np.array((0.05, 0.05, 0.10)), line=0.0)


def _house(c: Canvas, ink: np.ndarray) -> None:
    _land(c)
    v = c.v + 0.10
    c.part(_box(c.u, v, 0.24, 0.44, 0.06, 0.14), np.array((0.55, 0.35, 0.30)))
    c.part(_box(c.u, v, 0, -0.12, 0.40, 0.32), np.array((0.97, 0.91, 0.78)))
    c.part(_convex(c.u, v, ((-0.54, 0.18), (0.54, 0.18), (0, 0.62))), ink)
    c.part(_box(c.u, v, 0, -0.27, 0.09, 0.17), ink * 0.75)
    glow = np.where(c.s.time[:, None] == 2, (1.0, 0.88, 0.40), (0.55, 0.78, 0.92)).astype(np.float32)
    for x, y, when in ((-0.25, -0.10, 1.0), (0.25, -0.10, _is(c.s.parts, 1, 2)), (0.0, 0.30, _is(c.s.parts, 2))):
        c.part(_box(c.u, v, x, y, 0.075, 0.075), glow, when, line=0.035)


def _tree(c: Canvas, ink: np.ndarray) -> None:
    _land(c)
    v = c.v + 0.04
    c.part(_box(c.u, v, 0, -0.42, 0.075, 0.24), np.array((0.45, 0.28, 0.16)))
    round_, pine, fruit = _is(c.s.parts, 0, 2), _is(c.s.parts, 1), _is(c.s.parts, 2)
    left, right = (_disc(c.u, v, side * 0.22, 0.02, 0.24) for side in (-1, 1))
    crown = np.minimum(_disc(c.u, v, 0, 0.24, 0.28), np.minimum(left, right))
    c.part(crown, ink, round_)
    for y, half in ((-0.22, 0.42), (0.04, 0.34), (0.30, 0.24)):
        c.part(_convex(c.u, v, ((-half, y), (half, y), (0, y + 0.36))), ink, pine)

    for x, y in ((-0.20, 0.06), (0.04, 0.28), (0.22, 0.02)):
        colour = np.where(c.s.colour[:, None] == _RED, (1.0, 0.9, 0.3), (0.88, 0.12, 0.14))
        c.part(_disc(c.u, v, x, y, 0.065), colour, fruit, line=0.0)


def _planet(c: Canvas, ink: np.ndarray) -> None:
    _gradient(c, _SPACE)
    _stars(c, _STARS + _LOW_STARS, np.ones(len(c.s), np.float32))
    ring, moons = _is(c.s.parts, 1), _is(c.s.parts, 2)
    cream = np.array((0.96, 0.90, 0.74))
    tilt_u, tilt_v = c.u * 0.96 + c.v * 0.28, c.v * 0.96 - c.u * 0.28
    band = np.abs(_oval(tilt_u, tilt_v, 0, 0, 0.66, 0.17)) - 0.035
    c.part(band, cream, ring, line=0.03)
    ball = _disc(c.u, c.v, 0, 0, 0.40)
    c.part(ball, ink)
    for y, h in ((0.16, 0.05), (-0.14, 0.07)):
        c.part(np.maximum(np.abs(tilt_v - y) - h, ball), ink * 0.72, line=0.0)
    c.part(np.maximum(band, tilt_v), cream, ring, line=0.03)
    for x, y, r in ((0.58, 0.40, 0.12), (-0.60, -0.36, 0.09)):
        c.part(_disc(c.u, c.v, x, y, r), cream, moons)


def _boat(c: Canvas, ink: np.ndarray) -> None:
    _land(c, -0.22, sea=True)
    v = c.v + 0.06
    c.part(_box(c.u, v, 0, 0.18, 0.025, 0.46), np.array((0.45, 0.30, 0.18)))
    sail = np.array((0.98, 0.96, 0.90))
    c.part(_convex(c.u, v, ((0.06, -0.14), (0.46, -0.14), (0.06, 0.58))), sail)
    c.part(_convex(c.u, v, ((-0.40, -0.14), (-0.06, -0.14), (-0.06, 0.44))), sail, _is(c.s.parts, 1, 2))
    c.part(_convex(c.u, v, ((0.0, 0.64), (0.0, 0.82), (-0.26, 0.73))), ink, _is(c.s.parts, 2))
    c.part(_convex(c.u, v, ((-0.34, -0.46), (0.34, -0.46), (0.54, -0.20), (-0.54, -0.20))), ink)


def _balloon(c: Canvas, ink: np.ndarray) -> None:
    _land(c, -0.62)
    v = c.v - 0.10
    for side in (-1, 1):
        rope = np.abs(c.u - side * (0.10 + (v + 0.58) * 0.42)) - 0.012 + 10 * np.clip(np.abs(v + 0.42) - 0.16, 0, None)
        c.part(rope, np.array((0.35, 0.25, 0.2)), line=0.012)

    cone = _convex(c.u, v, ((-0.12, -0.40), (0.12, -0.40), (0.385, -0.02), (-0.385, -0.02)))
    bag = np.minimum(_disc(c.u, v, 0, 0.14, 0.42), cone)
    c.part(bag, ink)
    pale = np.where(c.s.colour[:, None] == _WHITE, (0.86, 0.30, 0.28), (0.99, 0.95, 0.86))
    c.part(np.maximum(np.abs(c.u) - 0.11, bag), pale, _is(c.s.parts, 1), line=0.0)
    c.part(np.maximum(np.abs(v - 0.12) - 0.10, bag), pale, _is(c.s.parts, 2), line=0.0)
    c.part(_box(c.u, v, 0, -0.66, 0.12, 0.09), np.array((0.62, 0.42, 0.22)))


def _cat(c: Canvas, ink: np.ndarray) -> None:
    _land(c)
    v = c.v + 0.02
    tail = np.abs(np.hypot(c.u - 0.36, v + 0.30) - 0.20) - 0.055
    c.part(np.maximum(tail, 0.30 - c.u), ink)
    c.part(_oval(c.u, v, 0, -0.34, 0.30, 0.34), ink)
    for side in (-1, 1):
        c.part(_convex(c.u, v, ((side * 0.30, 0.20), (side * 0.06, 0.36), (side * 0.29, 0.58))), ink)
    c.part(_oval(c.u, v, 0, 0.20, 0.32, 0.26), ink)
    belly = np.where(c.s.colour[:, None] == _WHITE, (0.86, 0.84, 0.80), (0.98, 0.94, 0.88))
    c.part(_oval(c.u, v, 0, -0.36, 0.15, 0.22), belly, _is(c.s.parts, 1), line=0.0)
    for x in (-0.10, 0.0, 0.10):
        c.part(_box(c.u, v, x, 0.38, 0.025, 0.07), ink * 0.5, _is(c.s.parts, 2), line=0.0)

    for side in (-1, 1):
        c.part(_disc(c.u, v, side * 0.13, 0.22, 0.07), np.array((1.0, 1.0, 0.92)), line=0.0)
        c.part(_disc(c.u, v, side * 0.13, 0.21, 0.042), np.array((0.05, 0.10, 0.08)), line=0.0)

    c.part(_oval(c.u, v, 0, 0.07, 0.05, 0.035), np.array((0.85, 0.35, 0.42)), line=0.0)


# By label, in the order of ``picture_book.LABELS``.
DRAW: tuple[Callable[[Canvas, np.ndarray], None], ...] = (
    _sunset, _mountains, _flower, _fish, _house, _tree, _planet, _boat, _balloon, _cat,
)  # fmt: skip
