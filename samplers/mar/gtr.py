"""GtR: the tokens on one colour of a checkerboard are decided slowly, those on the other colour in few AR steps.

Source: Yan et al., "Generation then Reconstruction: Accelerating Masked Autoregressive Models via Two-Stage Sampling"
(ICLR 2026, arXiv 2510.17171). No code was published; what the paper leaves open is chosen here and named in
docs/papers.md.

1. *order and sizes*: the cells of even row + column are the structure. Of 256 tokens, these are 128. They are divided
   into three stages of 32, 32 and 64 tokens, for which 12, 3 and 1 AR steps are taken. An AR step of these stages
   decides 2.67, 10.67 and 64 tokens on average. The other 128 tokens are reconstructed from the structure in one or
   two AR steps. :meth:`GtRSettings.orders` and :meth:`GtRSettings.left` are this plan.
2. *diffusion steps*: their number falls from one AR step of the structure to the next. The reconstruction takes the
   smallest number.
3. *frequency-weighted token selection* (FTS): the tokens of an AR step whose conditions z have most energy in high
   frequencies take the first AR step's number of diffusion steps. The other tokens take the AR step's own number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...networks.mar import MARModel
from ...networks.torch_state import in_own_state
from ..chain import StepTable
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..engine import Sampler, decode
from ..noise import PairedNoise
from .canvas import MARCanvas, Tokens, mar_canvas
from .mar import Diffusion, FullTransformer, Heads, Transformer, annealed_tables
from .settings import GtRSettings


@in_own_state
@torch.no_grad()
def gtr(
    model: MARModel,
    condition: MaskedCondition,
    settings: GtRSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """GtR on MAR; see :func:`samplers.mar.mar.mar` for arguments and errors.

    With ``reconstruction_steps`` 0 and diffusion steps that do not fall this is plain MAR bit for bit.
    """
    canvas = mar_canvas("gtr", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)

    # An edit may have fewer tokens to reconstruct.
    *_, last = settings.stage_sizes(model.net.config.grid, canvas.again)
    reconstruction = min(settings.reconstruction_steps, last)
    tables = annealed_tables(canvas, level=max(1, reconstruction))
    draw = FrequencyWeighted(canvas, transformer.heads, tables, settings.detail_share)
    yield from decode(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()


class FrequencyWeighted(Diffusion):
    """MAR's draw, but the tokens with most detail take the first AR step's number of diffusion steps.

    Args:
        canvas, heads, tables: see :class:`Diffusion`.
        share: share of an AR step's tokens with most detail, 0 to 1.
    """

    def __init__(self, canvas: MARCanvas, heads: Heads, tables: Sequence[StepTable], share: float):
        super().__init__(canvas, heads, tables)
        self.share = share

    def __call__(self, step: int, here: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at positions ``here``, int64 [B, n], from conditions z [P, B, n, C]: fp32 [B, n, c]."""
        canvas = self.canvas
        most, few = self.tables[0], self.tables[step]
        count = math.floor(round(self.share * here.shape[1], 9))
        if not count or few is most:
            return super().__call__(step, here, z)

        # 1. The columns of every image's tokens, those with most energy first.
        columns = high_frequency_energy(z[0]).argsort(dim=1, descending=True)

        # 2. The tokens with most detail and all other tokens, each group with its number of diffusion steps.
        detailed = Tokens.in_columns(columns[:, :count], here)
        others = Tokens.in_columns(columns[:, count:], here)
        most_detail = canvas.batch(most, detailed, z, self.noise)
        least_detail = canvas.batch(few, others, z, self.noise)

        # 3. Sample both groups in one loop.
        values = torch.empty(*here.shape, canvas.values.shape[-1], device=z.device)
        of_detailed, of_others = self.heads.sample_both(most_detail, least_detail)
        values[detailed.index[0], detailed.column] = of_detailed
        values[others.index[0], others.column] = of_others
        return values


def high_frequency_energy(z: Tensor) -> Tensor:
    """Energy of conditions [..., D] in which high frequencies weigh more, fp32 [...].

    sum_n (1 + n / (D / 2)) |F_n|^2 over the frequencies n = 0 .. D / 2 of a discrete Fourier transform of the channels.
    """
    spectrum = torch.fft.rfft(z.float())
    frequency = torch.arange(spectrum.shape[-1], device=z.device)
    weight = 1 + frequency / (z.shape[-1] / 2)
    return (weight * spectrum.abs().square()).sum(-1)
