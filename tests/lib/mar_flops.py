"""Floating-point operations of MAR and LazyMAR for one guided image, from shapes alone: 2 per multiply-add.

``published`` counts what the authors' code computes, which the papers' figures are of. It computes more than it needs:
all rows of the decoder's last block, the attention of all rows in the block that measures, and at every diffusion step
the embeddings of time and condition and the modulations of blocks whose outputs are reused.
"""

from fastar_nodes.networks.mar import MARConfig
from fastar_nodes.samplers.mar.lazy.head import MIDDLE, StepKind, head_schedule
from fastar_nodes.samplers.mar.lazy.schedule import (
    BY_STATE,
    computed_ratios,
    measuring_block,
    next_refreshes,
    spare_rows,
)
from fastar_nodes.samplers.mar.lazy.settings import LazyMARSettings, head_period
from fastar_nodes.samplers.mar.schedule import masked_after
from torch import device


def block_flops(dim: int, rows: int, wanted: int, keys: int) -> int:
    """Floating-point operations of a MAR block.

    It computes keys and values of ``rows`` rows, and the rest of ``wanted`` rows over ``keys`` keys each.
    """
    return 2 * (rows * 3 * dim**2 + wanted * (9 * dim**2 + 2 * dim * keys))


def plain_head_flops(c: MARConfig, rows: int) -> int:
    """Floating-point operations of head rows: tokens times diffusion steps, both branches of guidance."""
    a_row = c.head_width * ((c.head_depth * 5 + 2) * c.head_width + 3 * c.channels)
    return 2 * rows * a_row


def flops(c: MARConfig, s: LazyMARSettings, published: bool = False) -> int:
    """Those of an image; ``refresh_period`` 1 is plain MAR."""
    return transformer_flops(c, s, published) + head_flops(c, s, published)


def transformer_flops(c: MARConfig, s: LazyMARSettings, published: bool) -> int:
    left = masked_after(c.tokens, s.steps)
    starts = [0, *(c.tokens - masked for masked in left)]
    until = next_refreshes(s, s.steps)
    refreshed = {0, *until}

    out = 0
    for k in range(s.steps):
        known, wanted = starts[k], starts[k + 1] - starts[k]
        if k in refreshed:
            encoded = c.buffer + known
            out += 2 * c.encoder_depth * block_flops(c.dim, encoded, encoded, encoded)
            out += 2 * decoder_flops(c, s, 0, c.buffer + c.tokens, wanted, published)
            continue

        new = known - starts[k - 1]
        encoded = c.buffer + (new if s.encoder_cache else known)
        branch = c.encoder_depth * block_flops(c.dim, encoded, encoded, c.buffer + known)
        branch += decoder_flops(
            c, s, measuring_block(c.decoder_depth), rows(c, s, k, known, wanted, new), wanted, published
        )
        out += branch if s.condition_cache else 2 * branch
    return out


def rows(c: MARConfig, s: LazyMARSettings, k: int, known: int, wanted: int, new: int) -> int:
    """Decoder rows behind the chosen block at an AR step between two refreshes."""
    total = c.buffer + c.tokens
    if not s.token_cache:
        return total
    if s.selection in BY_STATE:
        return known + wanted if s.selection == "decided" else c.tokens - known + new
    share = computed_ratios(s, s.steps)[k]
    return min(total, max(wanted + new + spare_rows(total), int(total * share)))


def decoder_flops(c: MARConfig, s: LazyMARSettings, chosen: int, count: int, wanted: int, published: bool) -> int:
    """One branch: all rows up to block ``chosen``, counted from 1, and ``count`` behind it."""
    total = c.buffer + c.tokens
    out = 0
    for block in range(1, c.decoder_depth + 1):
        made = total if block <= chosen else count
        finished = made if block != chosen else count
        if block == c.decoder_depth and not published:
            finished = wanted
        out += block_flops(c.dim, made, finished, total)
        if block == chosen and published:
            out += 2 * 2 * c.dim * total * (total - count)  # the attention of the rows that are left out here
    return out


def head_flops(c: MARConfig, s: LazyMARSettings, published: bool) -> int:
    square = c.head_width**2
    embeddings = square + (256 + c.dim) * c.head_width if published else 0
    ends = embeddings + 2 * square + 3 * c.channels * c.head_width  # what every step computes
    full = ends + 5 * c.head_depth * square

    steps = s.diffusion_steps
    period = head_period(s, steps)
    if period == 1:
        return 2 * 2 * c.tokens * steps * full

    own = len([j for j in range(c.head_depth) if j not in MIDDLE])
    edge = ends + 5 * own * square
    reused = ends + (3 if published else 1) * own * square
    of_kind = {StepKind.FULL: 2 * full, StepKind.EDGE: edge}
    return 2 * c.tokens * sum(of_kind.get(kind, reused) for kind in head_schedule(steps, period, device("cpu")).kinds)
