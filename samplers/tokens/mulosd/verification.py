"""MuLo-SD's target: one pass verifies the drafts of a block, and further passes resample the block's islands.

Sources: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). Pooling is from
LANTERN (Jang et al. 2025, ICLR 2025, arXiv 2410.03355).

A *draft* is the draft token of a cell: a code of a VQ codebook. Its *neighbours* are the codes with the most similar
vectors. Whether MuLo-SD accepts the draft depends on its *pooled* probability: the sum of the target's probabilities of
the code and of its neighbours. The file has, in this order:

1. :class:`BlockVerifier`, the target, which runs the stages 3, 4 and 5 of the cycle in ``__init__.py``. ``islands.py``
   says which cells are resampled, and in which pass;
2. which drafts are accepted: :func:`pooled` and :func:`reject_all_but_share`;
3. the table of neighbours: :func:`cached_neighbours` and :func:`nearest_codes`.

The transformer's output for a fed token is a *hidden row*. It predicts the cell after this token.

Shapes: B images; R batch rows, which are B or, with guidance, 2 B; G x G cells of the target's grid; n cells of a block
of h grid rows; a cells of a wave; m fed tokens; D channels of a hidden row; V codes, each with k neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....networks.autoencoder import Codebook
from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED
from ...engine import Verdict
from ..canvas import TokenCanvas
from ..looks import CachedTransformer, FedRows, chosen_rows
from ..prepare import PreparedCondition
from ..sampling import TokenDraw, guidance_at, tempered
from .drafting import Block, progress_of_repair
from .islands import Repair, Wave, waves_of_block
from .settings import MuLoSDSettings

# This many logits are computed at once, for all batch rows together. They take 64 MiB in fp32.
_LOGITS_AT_ONCE = 1 << 24


class BlockVerifier:
    """The target M_p, with the keys and values of all blocks so far. For each block, call :meth:`verify`, then
    :meth:`accept`, then :meth:`resample`.

    Args:
        canvas: the target's images.
        condition: the condition, prepared for the target.
        neighbours: the table of neighbours, int32 [V, 1 + k], see :func:`nearest_codes`.
    """

    verifying_pass: int  # index of the pass that verified the newest block; verify sets it

    def __init__(self, canvas: TokenCanvas, condition: PreparedCondition, neighbours: Tensor):
        self.canvas = canvas
        self.settings: MuLoSDSettings = canvas.settings
        self.transformer = CachedTransformer(canvas, condition)
        self.reads_null = canvas.sampling.uses_guidance  # whether the transformer also reads the null condition
        self.draw = TokenDraw(canvas)
        self.neighbours = neighbours
        self.pools: list[Tensor] = []  # for every block so far, the pooled probabilities, fp32 [B * n]

        # Where each cell is fed (L cells of an image; the canvas's cell L is padding):
        #
        #     cell              image slot   position
        #     c, up to L - 2    c            c
        #     L - 1             never fed: it predicts no cell
        #     L, padding        L - 1        L - 2 (any would do)
        #
        # No token attends to slot L - 1. A single image has no padding, so it needs one slot less.
        self.last_position = canvas.cells - 2
        self.padding_slot = canvas.cells - 1
        self.slot_count = canvas.cells if canvas.images > 1 else canvas.cells - 1  # number of image slots

    # ------------------------------------------------------------ 3. verification

    def verify(self, block: Block) -> tuple[Tensor, np.ndarray]:
        """Stage 3: verify the drafts of a block in one causal pass. The host waits for the device here.

        Returns the hidden rows [R, n, D] that predict the cells of the block, and the rejected drafts R_T, bool
        [B, h, G].
        """
        canvas = self.canvas
        # Both models share the report, so the passes of both models are numbered together, from 0. The index of the
        # next pass is therefore the number of passes so far.
        self.verifying_pass = canvas.report.counts["transformer_passes"]
        with canvas.clock.phase("transformer"):
            hidden = self.feed_block(block)
        with canvas.clock.phase("verification"):
            pool, rejected = self.pool_and_reject(hidden, block.cells)

        self.pools.append(pool.flatten())
        return hidden, rejected.cpu().numpy().reshape(canvas.images, -1, canvas.grid[1])

    def feed_block(self, block: Block) -> Tensor:
        """Feed the drafts of a block, and feed the previous block again to update its keys and values.

        Returns the hidden rows [R, n, D] that predict the cells of the block.
        """
        canvas = self.canvas
        end = block.cells.stop - 1  # the last cell of the block is not fed: it would predict a cell outside the block
        if block.is_first:
            hidden = self.transformer.prefill(self.reads_null, self.slot_count, canvas.values[:, :end])
        else:
            fed = torch.arange(block.fed_from, end, device=canvas.device)
            fed_rows = self.causal_rows(fed, slot=fed, position=fed, end=end)
            hidden = self.transformer.feed(canvas.values, fed_rows, self.reads_null)

        # The row of a fed cell predicts the next cell. In the prefill, one more row comes first, and predicts cell 0.
        # The last row predicts the last cell of the block, so the last n rows predict the n cells of the block.
        return hidden[:, -len(block.cells) :]

    def pool_and_reject(self, hidden: Tensor, cells: range) -> tuple[Tensor, Tensor]:
        """The pooled probabilities of the drafts of n ``cells``, fp32 [B, n], and the rejected drafts R_T, bool [B, n].

        The target's probabilities are taken after guidance, temperature, top-k, top-p and ``entropy_temperature``; the
        paper leaves this open.

        ``hidden``: the hidden rows that predict these cells, [R, n, D].

        FastAR does not record this function as a CUDA graph. A recording would save little time, because the kernels of
        a whole block take longer than their launches. It would also keep the memory of the logits occupied.
        """
        # 1. The pooled probability of each draft. If a share is accepted, also its probability without neighbours. To
        #    limit memory, the logits are computed for some cells at a time.
        share = self.settings.acceptance_target
        sampling = self.canvas.sampling
        size = cells_at_once(len(hidden), self.draw.net.config.vocab)
        cells_on_device = torch.arange(cells.start, cells.stop, device=hidden.device)
        pools = []
        own_probabilities = []
        for part, hidden_of_part in zip(cells_on_device.split(size), hidden.split(size, dim=1), strict=True):
            # In serial decoding, cell c is decided with the cfg_step c - 1.
            logits = self.draw.logits(hidden_of_part, guidance_at(sampling, part - 1))
            p = tempered(logits, sampling).softmax(-1)
            drafts = self.canvas.values[:, part]
            pools.append(pooled(p, drafts, self.neighbours))
            if share:
                own_probabilities.append(p.gather(-1, drafts[..., None])[..., 0])
        pool = torch.cat(pools, dim=1)

        # 2. Accept a share of the drafts or, without a share, all drafts whose pooled probability is at least tau.
        if share:
            own_probability = torch.cat(own_probabilities, dim=1)
            return pool, reject_all_but_share(pool, share, own_probability, tokens_before=cells.start)
        return pool, pool < self.settings.tau

    # ------------------------------------------------------------ 4. acceptance

    def accept(self, block: Block, repair: Repair) -> None:
        """Stage 4: decide the drafts of a block that are not resampled. For the report, the pass that verified the
        block decides them.
        """
        canvas = self.canvas
        kept = ~repair.region.reshape(canvas.images, -1)
        image, cell_of_block = to_device(np.stack(kept.nonzero()), canvas.device)
        cell = cell_of_block + block.cells.start
        outcome = torch.full_like(cell, ACCEPTED, dtype=torch.uint8)
        canvas.decide((image, cell), canvas.values[image, cell], self.verifying_pass, outcome)

    # ------------------------------------------------------------ 5. resampling

    def resample(self, block: Block, hidden: Tensor, repair: Repair) -> Iterator[tuple[int, Verdict]]:
        """Stage 5: resample the islands of a block, one wave per pass. Yields after every wave: the progress
        (:func:`.progress_of_repair`), and the verdict, which has the cells of the wave and their new tokens. The next
        wave reads these tokens from the canvas, so the caller must decide the cells before it asks for the next wave.

        Args:
            block: the block.
            hidden: from :meth:`verify`, [R, n, D]. These rows predict all cells of the block, so wave 0 needs no pass
                of its own. Wave 0 is yielded even if no cell is resampled.
            repair: the waves of the block.
        """
        canvas = self.canvas
        wave_of_cell = repair.wave_of_cell.reshape(canvas.images, -1)
        outcome_of_cell = repair.outcome().reshape(canvas.images, -1)
        waves = waves_of_block(wave_of_cell, outcome_of_cell)

        for wave_index, wave in enumerate(waves):
            # 1. The hidden rows that predict the cells. Wave 0 takes them from the pass that verified the block.
            if wave_index > 0:
                hidden = self.feed_wave(block, wave)

            # 2. The cells of the wave, int64 [B, a] each. One copy moves all arrays to the device.
            on_host = np.stack([self.on_canvas(block, wave.cells), wave.predicted_by, wave.outcome])
            cells, predicted_by, outcome = to_device(on_host, canvas.device).unbind()

            # 3. Their new tokens. Each wave after wave 0 has had one pass since the pass that verified the block.
            tokens = self.sample(hidden, predicted_by, cells)
            verdict = Verdict(cells, tokens, self.verifying_pass + wave_index, outcome.to(torch.uint8))
            yield progress_of_repair(block, wave_index + 1, len(waves)), verdict

    def feed_wave(self, block: Block, wave: Wave) -> Tensor:
        """Feed the cells ``wave.fed`` of a block. Returns their hidden rows, [R, m, D]."""
        canvas = self.canvas
        fed = to_device(self.on_canvas(block, wave.fed), canvas.device)

        # The image slot of a cell and its position are both the cell's number. Only padding, cell L, is above a limit.
        slot = fed.clamp(max=self.padding_slot)
        position = fed.clamp(max=self.last_position)
        with canvas.clock.phase("transformer"):
            fed_rows = self.causal_rows(fed, slot, position, end=block.cells.start + wave.end)
            return self.transformer.feed(canvas.values, fed_rows, self.reads_null)

    def on_canvas(self, block: Block, cells: np.ndarray) -> np.ndarray:
        """Cells of the canvas, int64 [B, a], for ``cells`` that are counted from the first cell of the block. The
        padding of a :class:`.Wave` becomes L, the canvas's cell for padding.
        """
        return np.where(cells < len(block.cells), block.cells.start + cells, self.canvas.cells)

    def causal_rows(self, cells: Tensor, slot: Tensor, position: Tensor, end: int) -> FedRows:
        """The fed rows for each of the ``cells`` at its ``position`` and image slot ``slot``, int64 [...] each.

        Each fed row attends to the condition. It also attends to all cells up to the row's position that are before
        the cell ``end``.
        """
        # The condition has the first slots of the cache; the slot of cell c is prefix + c, and its position is c. So
        # the mask can compare slots with positions.
        prefix = self.transformer.cache.prefix
        mask = torch.arange(prefix + end, device=cells.device) <= prefix + position[..., None]
        return FedRows(cell=cells, position=position, cache_slot=prefix + slot, cache_end=prefix + end, mask=mask)

    def sample(self, hidden: Tensor, predicted_by: Tensor, cells: Tensor) -> Tensor:
        """Sample a token for each of the ``cells``. Returns the tokens, int64 [B, a].

        Args:
            hidden: hidden rows, [R, m, D].
            predicted_by: for each cell, the index of the hidden row that predicts this cell, int64 [B, a].
            cells: a cells for each image, int64 [B, a].
        """
        if not cells.shape[1]:
            return cells  # no draft is rejected

        size = cells_at_once(len(hidden), self.draw.net.config.vocab)
        new = []
        with self.canvas.clock.phase("sampling"):
            for part, index in zip(cells.split(size, dim=1), predicted_by.split(size, dim=1), strict=True):
                guidance = guidance_at(self.canvas.sampling, part - 1)  # cfg_step c - 1, as in pool_and_reject
                new.append(self.draw.tokens(chosen_rows(hidden, index), guidance, part, self.canvas.values))
        return torch.cat(new, dim=1)


def cells_at_once(batch_rows: int, codes: int) -> int:
    """Number of cells whose logits are computed at once; it limits the memory. Each cell has ``batch_rows`` * ``codes``
    logits.
    """
    return max(1, _LOGITS_AT_ONCE // (batch_rows * codes))


# ------------------------------------------------------------ which drafts are accepted


def pooled(p: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """The pooled probability of each code, fp32 [...].

    Args:
        p: probabilities of all codes, fp32 [..., V].
        codes: the codes, int64 [...].
        table: from :func:`nearest_codes`.
    """
    return p.gather(-1, table[codes].long()).sum(-1)


def reject_all_but_share(pool: Tensor, share: float, own_probability: Tensor, *, tokens_before: int) -> Tensor:
    """Accept a ``share`` of every image's draft tokens, those with the highest ``pool``, and reject all others. Returns
    the rejected tokens R_T, bool [B, n].

    Before the comparison, ``pool`` is rounded to 4 decimals. Otherwise rounding errors would decide between tokens
    whose pooled probability is nearly 1. Among tokens with the same rounded value, those with the highest
    ``own_probability`` are accepted first. If ``own_probability`` is equal too, the tokens that come first in raster
    order are accepted first.

    Args:
        pool: pooled probability of each draft token, fp32 [B, n], from :func:`pooled`.
        share: 0 to 1. It applies to the tokens of this block and of all earlier blocks together.
        own_probability: probability of each draft token without its neighbours, fp32 [B, n].
        tokens_before: number of tokens of an image in earlier blocks.
    """
    # Earlier blocks have accepted round(share * tokens_before) tokens. This block accepts as many tokens as are needed
    # to reach the share in the earlier blocks and this block together.
    count = pool.shape[1]
    accepted = round(share * (tokens_before + count)) - round(share * tokens_before)

    # Sort by the less important criterion first, and then by the rounded pool. The second sort is stable: tokens with
    # the same rounded pool keep the order of the first sort.
    by_own = own_probability.argsort(dim=1, descending=True, stable=True)
    rounded = (pool * 1e4).round()
    by_pool = rounded.gather(1, by_own).argsort(dim=1, descending=True, stable=True)  # indices into by_own
    best_first = by_own.gather(1, by_pool)
    return torch.ones_like(pool, dtype=torch.bool).scatter(1, best_first[:, :accepted], False)


# ------------------------------------------------------------ the table of neighbours

# Each pair of codes has a score. This many scores are computed at once; they take 64 MiB in fp32.
_SCORES_AT_ONCE = 1 << 24


def cached_neighbours(codebook: Codebook, k: int, device: torch.device) -> Tensor:
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
        # |v - u|^2 = |v|^2 - 2 (v u - |u|^2 / 2), so for a code v, a larger score means a smaller distance.
        score = vectors[codes] @ vectors.t() - square / 2
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
