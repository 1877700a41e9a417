"""Which draft tokens MuLo-SD accepts.

A draft token is a code of a VQ codebook. Its *neighbours* are the codes with the most similar vectors. Whether MuLo-SD
accepts the draft token depends on its *pooled* probability: the sum of the target's probabilities of the code and of
its neighbours.

Sources: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). Pooling is from
LANTERN (Jang et al. 2025, ICLR 2025, arXiv 2410.03355).

Shapes: B images; V codes of the codebook, each with k neighbours; n draft tokens of a block. A block is the grid rows
of an image that the target verifies together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....networks.autoencoder import Codebook

# Each pair of codes has a score. This many scores are computed at once; they take 64 MiB in fp32.
_SCORES_AT_ONCE = 1 << 24


@torch.inference_mode()
def nearest_codes(vectors: Tensor, k: int) -> Tensor:
    """The table of neighbours, int32 [V, 1 + k]. The entry of a code holds the code itself, and then the k nearest
    codes by L2 distance, nearest first. A code is an index into ``vectors``.

    ``vectors``: fp32 [V, channels]; ``k`` is below V.
    """
    count = len(vectors)
    square = vectors.square().sum(1)
    parts = []
    for codes in torch.arange(count, device=vectors.device).split(_codes_at_once(count)):
        score = vectors[codes] @ vectors.t() - square / 2  # a larger score means a smaller distance
        score.scatter_(1, codes[:, None], torch.inf)  # the code itself is first, even if other codes have its vector
        parts.append(score.topk(1 + k, dim=1).indices.to(torch.int32))
    return torch.cat(parts)


def nearest_codes_bytes(count: int, k: int) -> float:
    """The most memory that :func:`nearest_codes` takes for ``count`` codes, in bytes."""
    table = count * (1 + k)  # number of entries; an entry (int32) and a score (fp32) take 4 bytes each
    scores = min(count, _codes_at_once(count)) * count

    # While a part of the table is computed, the memory holds the scores of the part, and the values and int64 indices
    # that topk returns. The values take at most as much memory as the scores, and the indices at most twice as much, so
    # all three take at most four times the memory of the scores. When the parts are joined, the table exists twice.
    return 4.0 * (table + max(table, 4 * scores))


def _codes_at_once(count: int) -> int:
    """Number of codes whose scores with all ``count`` codes are computed at once."""
    return max(1, _SCORES_AT_ONCE // count)


def codebook_neighbours(codebook: Codebook, k: int, device: torch.device) -> Tensor:
    """The table of :func:`nearest_codes` for the unit vectors of a VQ codebook, on ``device``. It takes 66 MB for
    16,384 codes and k 1000.

    The codebook keeps the last table, and the vectors from which this table was computed. The table is computed again
    if the vectors, k or the device have changed. The host waits for the device while the vectors are compared.
    """
    vectors = codebook.unit().detach()
    if codebook.neighbours is not None:
        made_for, table = codebook.neighbours
        is_wanted = table.shape[1] == 1 + k and table.device == device
        if is_wanted and made_for.device == vectors.device and torch.equal(made_for, vectors):
            return table

    codebook.neighbours = None  # free the old table before the new table is computed
    table = nearest_codes(vectors, k).to(device)
    codebook.neighbours = (vectors, table)
    return table


def pooled(p: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """The pooled probability of each code, fp32 [...].

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

    Before the comparison, ``pool`` is rounded to 4 decimals. Otherwise rounding errors would decide between tokens
    whose pooled probability is nearly 1. Among tokens with the same rounded value, those with the highest
    ``own_probability`` are accepted first. If ``own_probability`` is equal too, the tokens that come first in raster
    order are accepted first.

    Args:
        pool: pooled probability of each draft token, fp32 [B, n], from :func:`pooled`.
        share: 0 to 1. It applies to the tokens of this block and of all earlier blocks together.
        own_probability: probability of each draft token without its neighbours, fp32 [B, n]; None to use the unrounded
            ``pool``.
        tokens_before: number of tokens of an image in earlier blocks.
    """
    # Earlier blocks have accepted round(share * tokens_before) tokens. This block accepts as many tokens as are needed
    # to reach the share in the earlier blocks and this block together.
    count = pool.shape[1]
    accepted = round(share * (tokens_before + count)) - round(share * tokens_before)

    # 1. Sort by the second criterion, highest first.
    second = pool if own_probability is None else own_probability
    by_second = second.sort(dim=1, descending=True, stable=True).indices

    # 2. Sort the result by the first criterion. This sort is stable: tokens with the same rounded value keep the order
    #    of the first sort.
    first = (pool * 1e4).round()
    by_first = first.gather(1, by_second).sort(dim=1, descending=True, stable=True).indices
    order = by_second.gather(1, by_first)
    return torch.ones_like(pool, dtype=torch.bool).scatter(1, order[:, :accepted], False)
