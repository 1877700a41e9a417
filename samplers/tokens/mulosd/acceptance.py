"""Which drafts MuLo-SD accepts: by the probability of a draft token together with similar codes, its *neighbours*.

Sources: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149); pooling as in
LANTERN (Jang et al. 2025, ICLR 2025, arXiv 2410.03355).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....networks.autoencoder import Codebook

# Scores of pairs of codes that are computed at once: 64 MB in fp32.
_SCORES = 1 << 24


@torch.inference_mode()
def neighbours(vectors: Tensor, k: int) -> Tensor:
    """For each code its own number and then the numbers of its k nearest codes by L2 distance, nearest first, int32
    [V, 1 + k]. ``vectors``: the vectors of the codes, fp32 [V, channels]; k < V.
    """
    count = len(vectors)
    square = vectors.square().sum(1)
    parts = []
    for rows in torch.arange(count, device=vectors.device).split(_codes_at_once(count)):
        score = vectors[rows] @ vectors.t() - square / 2  # larger is nearer
        score.scatter_(1, rows[:, None], torch.inf)  # the code itself first, even with duplicates
        parts.append(score.topk(1 + k, dim=1).indices.to(torch.int32))
    return torch.cat(parts)


def neighbours_bytes(count: int, k: int) -> float:
    """The most memory that :func:`neighbours` takes for ``count`` codes, in bytes."""
    table = count * (1 + k)  # int32
    scores = min(count, _codes_at_once(count)) * count

    # While a piece is computed, it needs its scores and, for the nearest codes, at most as many scores again and int64
    # indices: four times the scores. When the pieces are joined, the table exists twice.
    return 4.0 * (table + max(table, 4 * scores))


def _codes_at_once(count: int) -> int:
    """Codes whose scores with all ``count`` codes are computed at once."""
    return max(1, _SCORES // count)


def codebook_neighbours(codebook: Codebook, k: int, device: torch.device) -> Tensor:
    """:func:`neighbours` of a VQ codebook's unit vectors on ``device``; 66 MB for 16,384 codes and k 1000.

    The codebook keeps one table, the last one, with the vectors that it was made for. The table is made again when the
    vectors differ, whatever has written them. The host waits for the comparison.
    """
    vectors = codebook.unit().detach()
    if codebook.neighbours is not None:
        made_for, table = codebook.neighbours
        is_wanted = table.shape[1] == 1 + k and table.device == device
        if is_wanted and made_for.device == vectors.device and torch.equal(made_for, vectors):
            return table

    codebook.neighbours = None  # two tables at a time would be large
    table = neighbours(vectors, k).to(device)
    codebook.neighbours = (vectors, table)
    return table


def pooled(p: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """The probability of each code together with its neighbours, fp32 [...].

    Args:
        p: probabilities of all codes, fp32 [..., V].
        codes: int64 [...].
        table: from :func:`neighbours`.
    """
    return p.gather(-1, table[codes].long()).sum(-1)


def reject_all_but_share(pool: Tensor, share: float, alone: Tensor | None = None, before: int = 0) -> Tensor:
    """R_T, bool [B, n], if a ``share`` of every image's tokens is accepted: the tokens with the highest ``pool``.

    Pooled probabilities that agree to 1e-4 are tied, because sums of the whole distribution differ by rounding. Among
    tied tokens, those with the highest probability ``alone`` come first, and then those that come first in raster
    order.

    Args:
        pool: fp32 [B, n], from :func:`pooled`.
        share: 0 to 1. It applies to the tokens of this block and of all earlier blocks together.
        alone: probability of each draft without its neighbours, fp32 [B, n]; None: equal for all.
        before: number of tokens of an image in earlier blocks.
    """
    # The earlier blocks accepted their share of tokens, rounded. This block accepts the rest of the share so far.
    count = pool.shape[1]
    accepted = round(share * (before + count)) - round(share * before)

    # Sort by the less significant key first; stable sorting keeps this order among tied tokens.
    order = torch.arange(count, device=pool.device).expand_as(pool)
    for key in (pool if alone is None else alone, (pool * 1e4).round()):
        in_order = key.gather(1, order).sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, in_order)
    return torch.ones_like(pool, dtype=torch.bool).scatter(1, order[:, :accepted], False)
