"""The regions of MuLo-SD by their definitions, in plain loops over the cells of one grid."""

import numpy as np


def plain_expansion(down: np.ndarray, radius: int) -> set[int]:
    """R_X of one grid bool [h, w]."""
    h, w = down.shape
    hit = [c for c in range(h * w) if down[c // w, c % w]]
    near = {u for u in range(h * w) for t in hit if abs(u // w - t // w) <= radius and abs(u % w - t % w) <= radius}
    return {u for u in near if u >= min(hit)}


def plain_islands(cells: set[int], w: int) -> list[list[int]]:
    """8-connected components by flood fill, in the order of their first cells."""
    left, out = set(cells), []
    while left:
        island, edge = set(), [min(left)]
        while edge:
            u = edge.pop()
            if u in left:
                left.discard(u)
                island.add(u)
                edge += [v for v in left if abs(u // w - v // w) <= 1 and abs(u % w - v % w) <= 1]
        out.append(sorted(island))
    return out


def plain_waves(islands: list[list[int]], w: int, window: int | None) -> list[list[int]]:
    """Waves by their definition, one after another."""
    reach = w if window is None else window
    left, out = [set(island) for island in islands], []
    while any(left):
        wave = sorted(
            u
            for island in left
            for u in island
            if not any(v // w == u // w and v < u or v // w < u // w and v % w < u % w + reach for v in island)
        )
        out.append(wave)
        left = [island - set(wave) for island in left]
    return out
