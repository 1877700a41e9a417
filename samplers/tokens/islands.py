"""Geometry of local repair: what is rejected, how far a rejection reaches, which cells hang together, and in which waves
they are drawn again.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149): acceptance by the
probability pooled over a code's nearest neighbours, expansion by a radius, rejection islands CC_8(R_X), and their
concurrent resampling, inside an island in raster order or with ZipAR's window. Pooling as in LANTERN (Jang et al. 2025,
ICLR 2025, arXiv 2410.03355), whose neighbours it takes.

Pooling runs on the device. The rest runs on the host: how many waves there are decides how many passes follow, so one
small map has to come back in any case, and a grid is too small for a device to gain anything.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

# Numbers of one block of the table "score of every code against every code": 64 MB in fp32.
_BLOCK = 1 << 24

# ------------------------------------------------------------------------------------------------ acceptance


@torch.inference_mode()
def neighbours(vectors: Tensor, k: int) -> Tensor:
    """Every code and those nearest to it.

    Args:
        vectors: fp32 [V, channels], compared by L2 distance; of equally distant ones any.
        k: neighbours of each, 0 to V - 1.

    Returns:
        int32 [V, 1 + k]: the code itself, then its neighbours, nearest first.
    """
    count = len(vectors)
    square = vectors.square().sum(1)
    parts = []
    for at in range(0, count, max(1, _BLOCK // count)):
        rows = torch.arange(at, min(count, at + max(1, _BLOCK // count)), device=vectors.device)
        score = vectors[rows] @ vectors.t() - square / 2  # the larger, the nearer
        score[torch.arange(len(rows), device=rows.device), rows] = torch.inf  # a code held twice is still its own first
        parts.append(score.topk(1 + k, dim=1).indices.to(torch.int32))
    return torch.cat(parts)


_tables: WeakKeyDictionary[nn.Module, dict[tuple[int, torch.device, int], Tensor]] = WeakKeyDictionary()


def codebook_neighbours(codebook: nn.Module, k: int, device: torch.device) -> Tensor:
    """:func:`neighbours` of a VQ codebook's unit vectors, on ``device``; made once a codebook, 66 MB for 16,384 codes and k 1000."""
    made = _tables.setdefault(codebook, {})
    weight: Tensor = codebook.embedding.weight  # type: ignore[union-attr, assignment]
    # Weights loaded in inference mode, as ComfyUI does, keep no count of their changes; nothing changes them there.
    key = (k, device, 0 if weight.is_inference() else weight._version)
    if key not in made:
        made.clear()  # one at a time: it is large
        made[key] = neighbours(codebook.unit(), k).to(device)  # type: ignore[operator]
    return made[key]


def pooled(p: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """Probability of a code or one of its neighbours, fp32 of the shape of ``codes``.

    Args:
        p: probabilities fp32 [..., V].
        codes: int64 [...].
        table: from :func:`neighbours`.
    """
    return p.gather(-1, table[codes].long()).sum(-1)


def rejected(pool: Tensor, tau: float, acceptance: float = 0.0) -> Tensor:
    """Which drafts are turned down, bool [B, n].

    Args:
        pool: from :func:`pooled`, [B, n].
        tau: least probability of an accepted draft.
        acceptance: if above 0, tau is chosen for every image such that this share of its drafts is accepted, 0..1; of drafts
            with the probability at the border, all.
    """
    if acceptance <= 0:
        return pool < tau
    kept = min(pool.shape[1], round(acceptance * pool.shape[1]))
    if not kept:
        return torch.ones_like(pool, dtype=torch.bool)
    return pool < pool.topk(kept, dim=1).values[:, -1:]


# ------------------------------------------------------------------------------------------------ islands


def _from_first(turned_down: np.ndarray) -> np.ndarray:
    """bool [B, h, w]: cells at or behind the first rejected one, in raster order."""
    return np.logical_or.accumulate(turned_down.reshape(len(turned_down), -1), axis=1).reshape(turned_down.shape)


def suffix(turned_down: np.ndarray) -> np.ndarray:
    """What is drawn again where a rejection discards all that follows: bool [B, h, w] of rejected cells bool [B, h, w]."""
    return _from_first(turned_down)


def expand(turned_down: np.ndarray, radius: int) -> np.ndarray:
    """R_X: cells within ``radius`` rows and columns of a rejected one, at or behind the first of them.

    Args:
        turned_down: bool [B, h, w]; every image is a block of its own.
        radius: the paper's l, 0 and up.

    Returns:
        bool [B, h, w].
    """
    near = turned_down
    for axis in (1, 2):
        grown = near.copy()
        for d in range(1, min(radius, near.shape[axis] - 1) + 1):
            ahead, behind = [slice(None)] * 3, [slice(None)] * 3
            ahead[axis], behind[axis] = slice(d, None), slice(None, -d)
            grown[tuple(ahead)] |= near[tuple(behind)]
            grown[tuple(behind)] |= near[tuple(ahead)]
        near = grown
    return near & _from_first(turned_down)


def islands(region: np.ndarray) -> np.ndarray:
    """8-connected components of each image.

    Args:
        region: bool [B, h, w].

    Returns:
        int32 [B, h, w]: 0 outside, else the island's number from 1, in the order of their first cells in the raster.
    """
    index = np.arange(region.size).reshape(region.shape)
    pairs = []
    for a, b in (
        (np.s_[:, :, :-1], np.s_[:, :, 1:]),
        (np.s_[:, :-1], np.s_[:, 1:]),
        (np.s_[:, :-1, :-1], np.s_[:, 1:, 1:]),
        (np.s_[:, :-1, 1:], np.s_[:, 1:, :-1]),
    ):
        touching = region[a] & region[b]
        pairs.append(np.stack([index[a][touching], index[b][touching]]))
    one, other = np.concatenate(pairs, axis=1)
    # Every cell points to an earlier one or itself. Joining roots and shortening paths takes a few rounds of whole arrays.
    root = np.arange(region.size)
    while True:
        a, b = root[one], root[other]
        if np.array_equal(a, b):
            break
        np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(root, shorter := root[root]):
            root = shorter
    first = (region.ravel() & (root == index.ravel())).reshape(len(region), -1)
    number = np.cumsum(first, axis=1, dtype=np.int32).ravel()
    return np.where(region, number[root].reshape(region.shape), 0).astype(np.int32)


# ------------------------------------------------------------------------------------------------ waves


def waves(numbered: np.ndarray, window: int | None = None) -> np.ndarray:
    """When each cell is drawn again: all islands at once, each in order.

    A cell waits for the cells of its own island to its left, and for those above it in columns below its own plus
    ``window``.

    Args:
        numbered: from :func:`islands`, int32 [B, h, w].
        window: 1 and up, ZipAR's; None, or as wide as the grid, is raster order.

    Returns:
        int32 [B, h, w]: the wave, counted from 0; -1 outside.
    """
    image, row, column = np.nonzero(numbered)
    out = np.full(numbered.shape, -1, np.int32)
    if not len(image):
        return out
    width, most = numbered.shape[2], int(numbered.max())
    island = image * most + numbered[image, row, column] - 1
    if window is None or window >= width:
        order = np.argsort(island, kind="stable")
        found = island[order]
        out[image[order], row[order], column[order]] = np.arange(len(order)) - np.searchsorted(found, found)
        return out
    # above[i, c]: the latest wave of island i in the rows above at columns up to c; the loop is over rows only.
    total, nothing = len(numbered) * most, np.iinfo(np.int32).min // 2
    above = np.full((total, width), -1, np.int32)
    for y in range(numbered.shape[1]):
        here = row == y
        if not here.any():
            continue
        present, i = np.unique(island[here], return_inverse=True)
        c, over = column[here], above[present]
        there = np.zeros(over.shape, bool)
        there[i, c] = True
        rank = np.cumsum(there, axis=1, dtype=np.int32) - 1
        # wave = 1 + max(above, wave of the one to the left), which is a running maximum once the rank is taken off.
        start = np.full(over.shape, nothing, np.int32)
        start[i, c] = over[i, np.minimum(c + window - 1, width - 1)] + 1 - rank[i, c]
        wave = np.maximum.accumulate(start, axis=1) + rank
        out[image[here], y, c] = wave[i, c]
        above[present] = np.maximum(over, np.maximum.accumulate(np.where(there, wave, nothing), axis=1))
    return out
