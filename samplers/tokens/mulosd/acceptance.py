"""Which draft tokens MuLo-SD accepts.

A draft token is a code of a VQ codebook. The decision depends on its *pooled* probability: the probability that the
target gives to this code and to similar codes, its *neighbours*, together.

Sources: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). Pooling is from
LANTERN (Jang et al. 2025, ICLR 2025, arXiv 2410.03355).

Shapes: B images; V codes of the codebook, each with k neighbours; n draft tokens of a block (the rows of an image that
are verified together).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....networks.autoencoder import Codebook

# How many scores of pairs of codes are computed at once: they take 64 MiB in fp32.
_SCORES_AT_ONCE = 1 << 24


@torch.inference_mode()
def nearest_codes(vectors: Tensor, k: int) -> Tensor:
    """The table of neighbours, int32 [V, 1 + k]. The row of a code holds its own number, and then the numbers of the k
    nearest codes by L2 distance, nearest first.

    ``vectors``: the vectors of the codes, fp32 [V, channels]. ``k`` is below V.
    """
    count = len(vectors)
    square = vectors.square().sum(1)
    parts = []
    for rows in torch.arange(count, device=vectors.device).split(_codes_at_once(count)):
        score = vectors[rows] @ vectors.t() - square / 2  # a larger score is a smaller distance
        score.scatter_(1, rows[:, None], torch.inf)  # the code itself comes first, even if another has the same vector
        parts.append(score.topk(1 + k, dim=1).indices.to(torch.int32))
    return torch.cat(parts)


def nearest_codes_bytes(count: int, k: int) -> float:
    """The most memory that :func:`nearest_codes` takes for ``count`` codes, in bytes."""
    table = count * (1 + k)  # int32, so each entry takes 4 bytes, as does a score
    scores = min(count, _codes_at_once(count)) * count

    # Each part of the table needs its scores. Its nearest codes then need at most the same number of scores again, and
    # their indices in int64: four times the scores in all. When the parts are joined, the table exists twice.
    return 4.0 * (table + max(table, 4 * scores))


def _codes_at_once(count: int) -> int:
    """How many codes may have their scores with all ``count`` codes computed at once."""
    return max(1, _SCORES_AT_ONCE // count)


def codebook_neighbours(codebook: Codebook, k: int, device: torch.device) -> Tensor:
    """The table of :func:`nearest_codes` for the unit vectors of a VQ codebook, on ``device``. It takes 66 MB for
    16,384 codes and k 1000.

    The codebook keeps the last table, together with the vectors from which it was computed. The table is computed again
    if these vectors, k or the device have changed. The host waits while the vectors are compared.
    """
    vectors = codebook.unit().detach()
    if codebook.neighbours is not None:
        made_for, table = codebook.neighbours
        is_wanted = table.shape[1] == 1 + k and table.device == device
        if is_wanted and made_for.device == vectors.device and torch.equal(made_for, vectors):
            return table

    codebook.neighbours = None  # frees the old table first: two tables at a time would be large
    table = nearest_codes(vectors, k).to(device)
    codebook.neighbours = (vectors, table)
    return table


def pooled(p: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """The pooled probability of each code, its neighbours included, fp32 [...].

    Args:
        p: probabilities of all codes, fp32 [..., V].
        codes: the codes, int64 [...].
        table: from :func:`nearest_codes`.
    """
    return p.gather(-1, table[codes].long()).sum(-1)


def reject_all_but_share(
    pool: Tensor, share: float, own_probability: Tensor | None = None, tokens_before: int = 0
) -> Tensor:
    """Accept a ``share`` of every image's draft tokens, those with the highest ``pool``, and reject all others. Returns
    the rejected tokens R_T, bool [B, n].

    ``pool`` is rounded to 4 decimals. Otherwise rounding errors would decide between tokens that have nearly the whole
    probability together with their neighbours. Among tokens with the same rounded value, those with the highest
    ``own_probability`` are accepted first. If ``own_probability`` is equal too, those that come first in raster order
    are accepted first.

    Args:
        pool: pooled probability of each draft token, fp32 [B, n], from :func:`pooled`.
        share: 0 to 1. It applies to the tokens of this block and of all earlier blocks together.
        own_probability: probability of each draft token without its neighbours, fp32 [B, n]; None: the unrounded
            ``pool``.
        tokens_before: number of tokens of an image in earlier blocks.
    """
    # Earlier blocks have accepted round(share * before) tokens. This block adds what is missing to the share so far.
    count = pool.shape[1]
    accepted = round(share * (tokens_before + count)) - round(share * tokens_before)

    # Sort by the less important key first. The second sort is stable, so it keeps this order among equal values.
    order = torch.arange(count, device=pool.device).expand_as(pool)
    for key in (pool if own_probability is None else own_probability, (pool * 1e4).round()):
        permutation = key.gather(1, order).sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, permutation)
    return torch.ones_like(pool, dtype=torch.bool).scatter(1, order[:, :accepted], False)
