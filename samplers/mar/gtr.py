"""GtR: the tokens on one colour of a checkerboard are decided in many AR steps, and the other tokens in one or two.

Source: Yan et al., "Generation then Reconstruction: Accelerating Masked Autoregressive Models via Two-Stage Sampling"
(ICLR 2026, arXiv 2510.17171). The authors published no code; docs/papers.md names our choices where the paper leaves
something open.

1. *order and sizes*: a cell is the place of a token in the image. The cells whose row + column is even are the
   *structure*, 128 of 256 tokens. GtR divides the structure into three stages of 32, 32 and 64 tokens, and decides them
   in 12, 3 and 1 AR steps. An AR step of these stages decides 2.67, 10.67 and 64 tokens on average. The last stage, the
   *reconstruction*, decides the other 128 tokens in one or two AR steps. :meth:`GtRSettings.orders` and
   :meth:`GtRSettings.masked_after_steps` implement this plan.
2. *diffusion steps*: their number falls from one AR step of the structure to the next. The reconstruction takes the
   smallest number.
3. *frequency-weighted token selection* (FTS): in each AR step, the tokens with most detail take the first AR step's
   number of diffusion steps. The other tokens take the AR step's own number. Detail is estimated from the condition z,
   the transformer's output for a token: more energy, above all in high frequencies, means more detail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.mar import MARModel
from ...networks.torch_state import in_own_state
from ..chain import StepTable
from ..conditioning import ClassOrPrompt
from ..editing import Edit
from ..engine import Sampler, run_passes
from ..noise import PairedNoise
from ..settings import knob
from .canvas import MARCanvas, Tokens, mar_canvas
from .mar import Diffusion, FullTransformer, HeadEvaluation, Transformer, annealed_tables
from .settings import DiSASettings

# ------------------------------------------------------------------------------------------------ the settings

# How GtR divides the cells into stages: as in the paper, or in quarters, for workflows from FastAR's first months.
PAPER = "paper"
QUARTERS = "quarters"

# Each field states its default and its help text first, then its range.
# fmt: off


@dataclass(frozen=True)
class GtRSettings(DiSASettings):
    """Settings of GtR.

    The first AR step and the tokens with most detail take ``diffusion_steps`` diffusion steps; the reconstruction
    takes ``diffusion_steps_end``.
    """

    fewest_steps: ClassVar[int] = 4
    different_image: ClassVar[bool] = True  # because the order of the tokens is different

    steps: int = knob(17, "Number of AR steps (the steps in which the tokens of the image are decided), including "
        "reconstruction_steps; more is slower and finer. Usual: 17 for 256 tokens, as in the paper, and 6 to 9 for the "
        "demo.",
        low=1, high=4096, step=1)
    reconstruction_steps: int = knob(1, "Number of AR steps at the end that decide the tokens of the second colour of "
        "the checkerboard (half of all tokens); more is slower and finer. Usual: 1; the paper allows 1 or 2.",
        low=0, high=256, step=1, unit="AR steps",
        more="At 0, the order of the tokens and the number of tokens per AR step are the same as in MAR Sampler; if "
            "*diffusion_steps_end* equals *diffusion_steps*, MAR then runs without acceleration.")
    detail_share: float = knob(0.1, "Share of the tokens of each AR step that get the full number of diffusion steps, "
        "because they have the most detail; the other tokens get fewer diffusion steps, and a higher share is slower "
        "and finer. Usual: 0.1; at 0, all tokens of an AR step get the same number of diffusion steps.",
        low=0.0, high=1.0, step=0.01,
        more="FastAR estimates a token's detail from the transformer's output for this token: more energy in high "
             "frequencies means more detail. The number of these tokens is rounded down: a share of 0.1 is one "
             "token of ten tokens, but no token of nine tokens. The setting has no effect if *diffusion_steps_end* "
             "equals *diffusion_steps*.")
    first_share: float = knob(0.75, "The first stage's share of the AR steps before the reconstruction (see "
                                    "stages); a higher share spends more AR steps on the layout and fewer on the "
                                    "other stages. Usual: 0.75, which is 12 of 16 AR steps.",
        low=0.01, high=0.99, step=0.01, advanced=True,
        more="The second stage takes the same share of the remaining AR steps, which is 3 of 4. If *stages* is "
            "*quarters*, *first_share* is a share of all AR steps.")
    stages: str = knob(PAPER, "The tokens before the reconstruction are decided in stages: with paper, three stages of "
        "1/8, 1/8 and 1/4 of all tokens; with quarters, two stages of 1/4. Usual: paper; quarters is for workflows "
        "that were saved before this setting existed.",
        choices=(PAPER, QUARTERS), advanced=True,
        more="*quarters* was our misreading of the paper. *quarters* needs about twice as many AR steps as *paper*: 32 "
            "AR steps for 256 tokens.")

    # fmt: on
    @property
    def stage_steps(self) -> tuple[int, ...]:
        """Number of AR steps of each stage, the reconstruction last.

        Raises:
            UserError: the reconstruction leaves fewer than one AR step for each other stage.
        """
        last = self.reconstruction_steps
        before = 3 if self.stages == PAPER else 2
        if self.steps < last + before:
            raise UserError(
                f"reconstruction_steps: the reconstruction takes {last} of {self.steps} AR steps and leaves "
                f"{max(0, self.steps - last)}, but the first half of the tokens needs at least {before}; set steps to "
                f"at least {last + before}, or reduce reconstruction_steps."
            )

        def share_of_steps(steps: int, at_most: int) -> int:
            return min(max(1, round(self.first_share * steps)), at_most)

        left = self.steps - last
        if self.stages == QUARTERS:
            first = share_of_steps(self.steps, at_most=left - 1)
            return first, left - first, last

        first = share_of_steps(left, at_most=left - 2)
        left -= first
        second = share_of_steps(left, at_most=left - 1)
        return first, second, left - second, last

    def stage_sizes(self, grid: int, regenerated: Tensor | None = None) -> tuple[int, ...]:
        """Number of tokens of each stage, the reconstruction last.

        ``grid``: tokens along one side of the image; ``regenerated``: see :meth:`MARBase.masked_after_steps`.

        Raises:
            UserError: in an edit, a stage has different numbers of tokens in different images.
        """
        stages = stages_of_cells(grid, self.stages)
        count = 4 if self.stages == PAPER else 3
        if regenerated is None:
            return tuple(stages.bincount(minlength=count).tolist())

        sizes = [stages[cells].bincount(minlength=count).tolist() for cells in regenerated.cpu()]
        if any(image_sizes != sizes[0] for image_sizes in sizes):
            raise UserError(
                "mask: in one of GtR's stages, the masks of the batch cover different numbers of tokens; use one mask "
                "for the batch, or run the images separately."
            )
        return tuple(sizes[0])

    def orders(self, random_orders: Tensor) -> Tensor:
        orders = super().orders(random_orders)
        if not self.reconstruction_steps:
            return orders

        grid = math.isqrt(orders.shape[1])
        return in_stages(orders, stages_of_cells(grid, self.stages))

    def masked_after_steps(self, tokens: int, regenerated: Tensor | None = None) -> list[int]:
        """See :meth:`MARBase.masked_after_steps`. In an edit, a stage with fewer tokens than AR steps decides one token
        per step.

        Raises:
            UserError: more AR steps than tokens, in a whole image or in one of its stages; too few AR steps for the
                stages; an edit in which a stage has different numbers of tokens in different images.
        """
        if not self.reconstruction_steps:
            return super().masked_after_steps(tokens, regenerated)

        names = ("first", "second", "third")[: len(self.stage_steps) - 1]
        sizes = self.stage_sizes(math.isqrt(tokens), regenerated)
        for name, size, steps in zip((*names, "last"), sizes, self.stage_steps, strict=True):
            if steps > size and regenerated is None:
                field = "reconstruction_steps" if name == "last" else "steps"
                remedy = "" if name == "last" else ", or change first_share"
                raise UserError(
                    f"{field}: GtR's {name} stage has {steps} AR steps for {size} tokens; reduce {field}{remedy}."
                )
        return staged_after(sizes, self.stage_steps)

    def reconstruction(self, tokens: int, regenerated: Tensor | None = None) -> int:
        """Number of AR steps of the reconstruction; arguments as for :meth:`masked_after_steps`. An edit with fewer
        tokens to reconstruct than ``reconstruction_steps`` takes one AR step for each of these tokens.
        """
        if not self.reconstruction_steps:
            return 0

        *_, last = self.stage_sizes(math.isqrt(tokens), regenerated)
        return min(self.reconstruction_steps, last)

    @property
    def approximates(self) -> bool:
        return self.reconstruction_steps > 0 or super().approximates


# ------------------------------------------------------------------------------------------------ the stages


def stages_of_cells(grid: int, stages: str) -> Tensor:
    """GtR's stage of every cell of a ``grid`` x ``grid`` image, int64 [L]; the last stage is the reconstruction.

    The paper halves the structure, and then halves one half again. So the first three stages are an eighth, an eighth
    and a quarter of all cells. QUARTERS joins the first two stages. Stages of an 8 x 8 grid, PAPER on the left and
    QUARTERS on the right::

        0 3 1 3 0 3 1 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        1 3 0 3 1 3 0 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        0 3 1 3 0 3 1 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        1 3 0 3 1 3 0 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
    """
    cell = torch.arange(grid * grid)
    row = cell // grid
    diagonal = row + cell % grid

    # All cells start as reconstruction. Then the structure becomes stage 2, and its cells in even rows stage 0 or 1.
    stage = torch.full_like(cell, 3)
    stage[diagonal % 2 == 0] = 2
    in_even_row = (diagonal % 2 == 0) & (row % 2 == 0)
    alternating = diagonal % 4 // 2  # on even diagonals: 0 and 1 by turns
    stage[in_even_row] = alternating[in_even_row]
    return stage if stages == PAPER else (stage - 1).clamp(min=0)


def staged_after(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Number of masked tokens after each AR step of GtR's stages.

    Stage i divides its ``sizes[i]`` tokens evenly among its ``steps[i]`` AR steps. If it has fewer tokens than AR
    steps, as in some edits, it takes one AR step for each token.
    """
    left = sum(sizes)
    out: list[int] = []
    for size, stage_step_count in zip(sizes, steps, strict=True):
        count = min(size, stage_step_count)
        out += [left - size * (s + 1) // count for s in range(count)]
        left -= size
    return out


def in_stages(orders: Tensor, stages: Tensor) -> Tensor:
    """Orders, int64 [B, L], that decide one stage after another. ``stages``: int64 [L] from :func:`stages_of_cells`.

    Within a stage, the cells keep their order in ``orders``.
    """
    # Descending, because an order's last position is decided first.
    return orders.gather(1, stages[orders].argsort(dim=1, descending=True, stable=True))


# ------------------------------------------------------------------------------------------------ the sampler


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

    If ``reconstruction_steps`` is 0 and the number of diffusion steps does not fall, the images are bit-identical to
    MAR's.
    """
    canvas = mar_canvas("gtr", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)
    reconstruction = settings.reconstruction(canvas.cells, canvas.regenerated)
    tables = annealed_tables(canvas, equal_at_end=max(1, reconstruction))
    draw = FrequencyWeighted(canvas, transformer.head, tables, settings.detail_share)
    yield from run_passes(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()


class FrequencyWeighted(Diffusion):
    """Samples the tokens of an AR step as :class:`Diffusion` does, but the tokens with most detail take the first AR
    step's number of diffusion steps.

    Args:
        canvas, head, tables: see :class:`Diffusion`.
        share: share of an AR step's tokens, 0 to 1, that count as tokens with most detail.
    """

    def __init__(self, canvas: MARCanvas, head: HeadEvaluation, tables: Sequence[StepTable], share: float):
        super().__init__(canvas, head, tables)
        self.share = share

    def __call__(self, step: int, positions: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at ``positions``, int64 [B, n], from conditions z [P, B, n, C]: fp32 [B, n, c]."""
        canvas = self.canvas
        longest = self.tables[0]
        table_of_step = self.tables[step]
        count = math.floor(round(self.share * positions.shape[1], 9))
        if not count or table_of_step is longest:
            return super().__call__(step, positions, z)

        # 1. The columns of ``positions`` in each image, the token with most energy first.
        columns = high_frequency_energy(z[0]).argsort(dim=1, descending=True)

        # 2. A batch of the tokens with most detail, and a batch of all other tokens, with fewer diffusion steps.
        detailed = Tokens.in_columns(columns[:, :count], positions)
        others = Tokens.in_columns(columns[:, count:], positions)
        batch_of_detailed = canvas.batch(longest, detailed, z, self.noise)
        batch_of_others = canvas.batch(table_of_step, others, z, self.noise)

        # 3. Sample both batches in one loop.
        values = torch.empty(*positions.shape, canvas.values.shape[-1], device=z.device)
        values_of_detailed, values_of_others = self.head.sample_both(batch_of_detailed, batch_of_others)
        values[detailed.index[0], detailed.column] = values_of_detailed
        values[others.index[0], others.column] = values_of_others
        return values


def high_frequency_energy(z: Tensor) -> Tensor:
    """Energy of conditions z [..., D], weighted so that high frequencies count more: fp32 [...].

    The energy is sum_n (1 + n / (D / 2)) |F_n|^2, where F_n for n = 0 .. D / 2 is the discrete Fourier transform of z
    along its D channels.
    """
    spectrum = torch.fft.rfft(z.float())
    frequency = torch.arange(spectrum.shape[-1], device=z.device)
    weight = 1 + frequency / (z.shape[-1] / 2)
    return (weight * spectrum.abs().square()).sum(-1)
