"""GtR decides the tokens on one colour of a checkerboard in many AR steps, and all others in one or two AR steps.

Source: Yan et al., "Generation then Reconstruction: Accelerating Masked Autoregressive Models via Two-Stage Sampling"
(ICLR 2026, arXiv 2510.17171). The authors published no code. docs/papers.md names our choices where the paper leaves
something open.

1. *order and sizes*: the tokens in cells with an even sum of row and column are the *structure*, for example 128 of 256
   tokens. GtR divides these 128 tokens into three stages of 32, 32 and 64 tokens, and decides the stages in 12, 3 and 1
   AR steps. So an AR step of these stages decides 2.67, 10.67 and 64 tokens on average. The last stage, the
   *reconstruction*, decides the other 128 tokens in one or two AR steps. ``stages.py`` has the stages, and
   ``settings.py`` makes the plan from them.
2. *diffusion steps*: from one AR step of the structure to the next, the number of diffusion steps falls. The
   reconstruction takes the smallest number.
3. *frequency-weighted token selection* (FTS): in each AR step, the tokens with the most detail take as many diffusion
   steps as the first AR step. The other tokens take the AR step's own number of diffusion steps. GtR estimates the
   detail of a token from its condition z, the transformer's output for the token: the more energy z has, the more
   detail the token has. Energy in high frequencies counts more than energy in low frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....networks.mar import MARModel
from ....networks.torch_state import in_own_state
from ...chain import HeadSampler
from ...conditioning import ClassOrPrompt
from ...diffusion_steps import StepTable
from ...editing import Edit
from ...engine import Sampler, run_passes
from ...noise import PairedNoise
from ..canvas import MARCanvas, TokenIndex
from ..mar import Diffusion, annealed_tables
from ..prepare import mar_canvas
from ..transformer import FullTransformer, Transformer
from .settings import GtRSettings


@in_own_state
@torch.no_grad()
def gtr(
    model: MARModel,
    condition: ClassOrPrompt,
    settings: GtRSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with GtR; see :func:`samplers.mar.mar.mar` for arguments and errors.

    If ``reconstruction_steps`` is 0 and all AR steps have the same number of diffusion steps, the images are
    bit-identical to the images of MAR.
    """
    canvas = mar_canvas("gtr", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)
    reconstruction = settings.reconstruction(canvas.cells, canvas.regenerated)
    tables = annealed_tables(canvas, equal_at_end=max(1, reconstruction))
    draw = FrequencyWeighted(canvas, transformer.heads, tables, settings.detail_share)
    yield from run_passes(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()


class FrequencyWeighted(Diffusion):
    """Samples the tokens of an AR step like :class:`Diffusion`, but the tokens with the most detail take as many
    diffusion steps as the first AR step.

    Args:
        canvas, heads: see :class:`Diffusion`.
        tables: from :func:`annealed_tables`, a table of diffusion steps for every AR step.
        share: the share of an AR step's tokens that count as the tokens with the most detail, 0 to 1.
    """

    def __init__(self, canvas: MARCanvas, heads: HeadSampler, tables: Sequence[StepTable], share: float):
        super().__init__(canvas, heads, tables)
        self.share = share

    def __call__(self, ar_step: int, positions: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at ``positions``, int64 [B, n], from z [P, B, n, D]; see :meth:`Diffusion.__call__`."""
        canvas = self.canvas
        longest = self.tables[0]  # from one AR step to the next, the number of diffusion steps never rises
        table_of_step = self.tables[ar_step]

        # The number of tokens with the most detail. ``round`` corrects a product that should be a whole number but is
        # slightly below it.
        count = math.floor(round(self.share * positions.shape[1], 9))

        # If this AR step has as many diffusion steps as the first, then annealed_tables gave both the same table.
        all_take_longest = table_of_step is longest
        if not count or all_take_longest:
            return super().__call__(ar_step, positions, z)

        # 1. The columns of ``positions`` in each image, the token with the most energy first, int64 [B, n]. z[0] is the
        #    branch with the class or prompt.
        columns = high_frequency_energy(z[0]).argsort(dim=1, descending=True)

        # 2. A batch of the tokens with the most detail, and a batch of all other tokens. The second batch has fewer
        #    diffusion steps.
        detailed = TokenIndex.in_columns(columns[:, :count], positions)
        others = TokenIndex.in_columns(columns[:, count:], positions)
        batch_of_detailed = canvas.batch(longest, detailed, z, self.noise)
        batch_of_others = canvas.batch(table_of_step, others, z, self.noise)

        # 3. Sample both batches in one loop.
        values = torch.empty(*positions.shape, canvas.values.shape[-1], device=z.device)  # fp32 [B, n, c]
        values_of_detailed, values_of_others = self.heads.sample_both(batch_of_detailed, batch_of_others)
        values[detailed.index_by_column] = values_of_detailed
        values[others.index_by_column] = values_of_others
        return values


def high_frequency_energy(z: Tensor) -> Tensor:
    """Energy of conditions z [..., D], fp32 [...]. High frequencies count more.

    The energy is sum_n (1 + n / (D / 2)) |F_n|^2, where F_n for n = 0 .. D / 2 is the discrete Fourier transform of z
    along its D channels.
    """
    spectrum = torch.fft.rfft(z.float())
    frequency = torch.arange(spectrum.shape[-1], device=z.device)
    weight = 1 + frequency / (z.shape[-1] / 2)
    return (weight * spectrum.abs().square()).sum(-1)
