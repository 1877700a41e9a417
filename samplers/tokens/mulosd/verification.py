"""MuLo-SD's target: one pass verifies the drafts of a block, and further passes resample its islands.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). ``acceptance.py``
says which drafts are accepted, and ``islands.py`` what is resampled. A *draft* is a draft token of a cell.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED
from ...engine import Verdict
from ..canvas import TokenCanvas
from ..looks import CachedTransformer, FedRows, chosen_rows
from ..prepare import PreparedCondition
from ..sampling import TokenDraw, guidance_at, tempered
from .acceptance import pooled, reject_all_but_share
from .blocks import Block
from .islands import Repair, WavePass, wave_passes
from .settings import MuLoSDSettings

# Logits of the target that are computed at once, of all images and branches: 64 MB in fp32.
_PIECE = 1 << 24


class BlockVerifier:
    """The target M_p, with the keys and values of all blocks so far.

    Args:
        canvas: the target's images.
        condition: the packed condition.
        neighbours: int32 [V, 1 + k], see :func:`.acceptance.neighbours`.
        draft_transformer: the draft model's, whose passes are numbered together with the target's.
    """

    def __init__(
        self,
        canvas: TokenCanvas,
        condition: PreparedCondition,
        neighbours: Tensor,
        draft_transformer: CachedTransformer,
    ):
        self.canvas = canvas
        self.settings: MuLoSDSettings = canvas.settings
        self.transformer = CachedTransformer(canvas, condition)
        self.null = canvas.sampling.guides  # whether the transformer reads the null condition too
        self.draw = TokenDraw(canvas)
        self.neighbours = neighbours
        self.draft_transformer = draft_transformer
        self.pools: list[Tensor] = []  # pooled probabilities fp32 [B * n] of every block

    # ------------------------------------------------------------ 3. verification

    def verify(self, block: Block) -> tuple[Tensor, np.ndarray]:
        """3. Verify the drafts of a block in one causal pass.

        Returns hidden rows [R, n, C], which predict the cells of the block, and R_T, the rejected drafts, bool [B, h,
        G]. The host waits for the device here.
        """
        canvas = self.canvas
        with canvas.clock.phase("transformer"):
            hidden = self.read(block)
        with canvas.clock.phase("verification"):
            pool, rejected = self.rejections(hidden, block.cells)

        self.pools.append(pool.flatten())
        return hidden, rejected.cpu().numpy().reshape(canvas.images, -1, canvas.grid[1])

    def read(self, block: Block) -> Tensor:
        """Feed a block. The block before it is fed again, which updates its keys and values. Returns the hidden rows
        [R, n, C] that predict the cells of the block.
        """
        canvas = self.canvas
        # A row predicts the cell after its own, so the last cell of the block need not be fed.
        if block.is_first:
            # In a batch the last cell is fed as padding, see WavePass.
            slots = canvas.cells if canvas.images > 1 else canvas.cells - 1
            hidden = self.transformer.prefill(self.null, slots, canvas.values[:, : block.cells.stop - 1])
        else:
            # The cells of the block before may have changed since they were fed.
            end = block.cells.stop - 1
            fed = torch.arange(block.fed_from, end, device=canvas.device)
            rows = causal_rows(fed, fed, self.transformer.cache.prefix, end)
            hidden = self.transformer.feed(canvas.values, rows, self.null)

        return hidden[:, -len(block.cells) :]

    def rejections(self, hidden: Tensor, cells: range) -> tuple[Tensor, Tensor]:
        """Pooled probabilities of the drafts of n ``cells``, fp32 [B, n]; and R_T, the rejected drafts, bool [B, n].
        The ``hidden`` rows, [R, n, C], predict these cells.

        This function is not recorded as a CUDA graph: the kernels of a whole block take longer than their launch, and a
        recording would keep the memory of the logits.
        """
        # 1. The probability of each draft, with its neighbours and alone. Logits are computed for some cells at a time.
        sampling = self.canvas.sampling
        size = cells_at_once(len(hidden), self.draw.net.config.vocab)
        on_device = torch.arange(cells.start, cells.stop, device=hidden.device)
        pools = []
        alone = []
        for part, rows in zip(on_device.split(size), hidden.split(size, dim=1), strict=True):
            logits = self.draw.logits(rows, guidance_at(sampling, part - 1))
            p = tempered(logits, sampling).softmax(-1)
            drafts = self.canvas.values[:, part]
            pools.append(pooled(p, drafts, self.neighbours))
            alone.append(p.gather(-1, drafts[..., None])[..., 0])
        pool = torch.cat(pools, dim=1)

        # 2. Accept a share of the drafts, or all drafts with a probability of tau and more.
        share = self.settings.acceptance_target
        if share:
            return pool, reject_all_but_share(pool, share, torch.cat(alone, dim=1), before=cells.start)
        return pool, pool < self.settings.tau

    # ------------------------------------------------------------ 4. acceptance

    @property
    def newest_pass(self) -> int:
        """The number of the newest pass. The passes of both models are numbered together, from 0."""
        return self.draft_transformer.passes + self.transformer.passes - 1

    def accept(self, block: Block, repair: Repair) -> None:
        """4. Decide the accepted drafts of a block. They count as decided by the pass that has verified them."""
        canvas = self.canvas
        accepted = repair.outcome().reshape(canvas.images, -1) == ACCEPTED
        image, cell = to_device(np.stack(accepted.nonzero()), canvas.device)
        cell = cell + block.cells.start
        outcome = torch.full_like(cell, ACCEPTED, dtype=torch.uint8)
        canvas.decide((image, cell), canvas.values[image, cell], self.newest_pass, outcome)

    # ------------------------------------------------------------ 5. resampling

    def resample(self, block: Block, hidden: Tensor, repair: Repair) -> Iterator[tuple[int, Verdict]]:
        """5. Resample the islands of a block, one wave per pass. Yields the progress after every pass, see
        :class:`Block`, and what the pass decides.

        The first wave feeds nothing. The verification has already computed the ``hidden`` rows [R, n, C], which predict
        all cells of the block.
        """
        canvas = self.canvas
        outcome = to_device(repair.outcome().reshape(canvas.images, -1), canvas.device)  # uint8 [B, n]
        waves = wave_passes(repair.wave.reshape(canvas.images, -1), block.cells.start, canvas.cells)

        for done, wave in enumerate(waves, 1):
            if done > 1:
                hidden = self.feed(wave)
            cells = to_device(wave.cells, canvas.device)
            values = self.sample(hidden, to_device(wave.predicted_by, canvas.device), cells)

            in_block = (cells - block.cells.start).clamp(max=len(block.cells) - 1)  # any cell for padding
            verdict = Verdict(cells, values, self.newest_pass, outcome.gather(1, in_block))
            yield block.progress_of_repair(done, len(waves)), verdict

    def feed(self, wave: WavePass) -> Tensor:
        """Feed the cells that a wave needs, see :class:`WavePass`. Returns hidden rows [R, m, C]."""
        canvas = self.canvas
        fed = to_device(wave.fed, canvas.device)
        position = to_device(wave.position, canvas.device)
        with canvas.clock.phase("transformer"):
            rows = causal_rows(fed, position, self.transformer.cache.prefix, wave.end)
            return self.transformer.feed(canvas.values, rows, self.null)

    def sample(self, hidden: Tensor, predicted_by: Tensor, cells: Tensor) -> Tensor:
        """Sample the tokens of ``cells``, int64 [B, n] both.

        ``predicted_by``: the index of the hidden row, of [R, m, C], that predicts each cell, int64 [B, n].
        """
        if not cells.shape[1]:
            return cells  # every draft is accepted

        size = cells_at_once(len(hidden), self.draw.net.config.vocab)
        new = []
        with self.canvas.clock.phase("sampling"):
            for part, rows in zip(cells.split(size, dim=1), predicted_by.split(size, dim=1), strict=True):
                guidance = guidance_at(self.canvas.sampling, part - 1)
                new.append(self.draw.tokens(chosen_rows(hidden, rows), guidance, part, self.canvas.values))
        return torch.cat(new, dim=1)


def causal_rows(cells: Tensor, position: Tensor, prefix: int, end: int) -> FedRows:
    """Rows that feed ``cells``, int64 [...], at a ``position`` each, int64 [...]. A row attends to the condition, which
    takes ``prefix`` slots, and to all cells up to its own position, but only to cells below ``end``.
    """
    mask = torch.arange(prefix + end, device=cells.device) <= prefix + position[..., None]
    return FedRows(cell=cells, position=position, cache_slot=cells + prefix, cache_end=prefix + end, mask=mask)


def cells_at_once(rows: int, codes: int) -> int:
    """How many cells may have their logits computed at once, which limits the memory. A cell has logits for ``rows``
    batch rows and ``codes`` codes.
    """
    return max(1, _PIECE // (rows * codes))
