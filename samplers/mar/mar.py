"""Plain MAR: every token by a full diffusion pass. Source: Li et al. 2024 (arXiv 2406.11838), section 3.

With annealed diffusion steps it is DiSA (arXiv 2505.20297), with speculation the same pictures' distribution in fewer
sequential evaluations of the head (``speculative.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ..conditioning import Condition
from ..noise import Dice, Noise, row_keys
from .denoiser import Denoiser, RowNoise
from .diffusion import tables
from .disa import annealed_steps
from .editing import Edit
from .loop import Conditions, Run, Sampler, Transformer, begin, generate
from .settings import MARSettings, PlainMARSettings
from .speculative import SpeculativeDenoiser
from .transformer import FullTransformer


class PlainHead:
    """Every token by a full diffusion pass of its own step: MAR as published."""

    reach = 1

    def __init__(self, run: Run, transformer: Transformer):
        self.transformer, self.noise = transformer, RowNoise(run, "full", run.tables)
        s = run.settings
        last, curve = (
            (s.diffusion_steps_end, s.diffusion_steps_curve) if isinstance(s, PlainMARSettings) else (0, "linear")
        )
        if last > s.diffusion_steps:
            raise UserError(
                f"diffusion_steps_end: {last} is more than diffusion_steps, {s.diffusion_steps}; lower it, or 0 to keep them."
            )
        self.counts = annealed_steps(s.diffusion_steps, last, curve, run.plan.steps)
        self.denoisers: dict[int, Denoiser] = {}
        # Without noise there is nothing to speculate on.
        self.window: int = getattr(s, "speculation", 0) if s.temperature > 0 else 0
        self.keys = row_keys(run.noise, "verify", run.tokens.shape[1]).to(run.tokens.device) if self.window else None

    def denoiser(self, run: Run, step: int) -> Denoiser:
        """The denoiser of an AR step's number of diffusion steps."""
        count = self.counts[step]
        if count not in self.denoisers:
            table = run.tables if count == run.settings.diffusion_steps else tables(count, run.t_max)
            made = self.transformer.denoiser(run, table)
            if self.window and type(made) is not Denoiser:
                raise UserError(
                    "speculation: it needs the diffusion head uncached; switch the cache's head_cache off, or set it to 0."
                )
            self.denoisers[count] = SpeculativeDenoiser(run, made.table, self.window) if self.window else made
        return self.denoisers[count]

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        batch, n = z.cond.shape[:2]
        where = run.plan.ahead(step)
        image = torch.arange(batch, device=where.device)[:, None].expand(-1, n).flatten()
        scale = torch.full((batch * n, 1), run.plan.cfg[step], device=where.device)
        rows = Conditions(z.cond.flatten(0, 1), None if z.null is None else z.null.flatten(0, 1))
        denoise = self.denoiser(run, step)
        first, noise = self.noise(image, where.flatten())
        # Fewer steps take evenly chosen noises of the full number, so that the picture stays comparable.
        kept = [k * len(noise) // len(denoise.table) for k in range(len(denoise.table))]
        noise = noise if len(kept) == len(noise) else noise[kept]
        if isinstance(denoise, SpeculativeDenoiser):
            assert self.keys is not None
            return denoise.speculate(rows, scale, first, noise, Dice(self.keys[image, where.flatten()])).view(
                batch, n, -1
            )
        return denoise(rows, scale, first, noise).view(batch, n, -1)


def mar(
    model: MARModel,
    condition: Condition,
    settings: MARSettings,
    noise: Noise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """Plain MAR.

    Args:
        model: network and what its file says.
        condition: B class labels.
        settings: :class:`MARSettings`, or :class:`PlainMARSettings` for annealed steps and speculation.
        noise: noise of B images.
        seed: only recorded in the report.
        transformer: how the networks are run; None for in full.
        edit: part of a picture to be drawn anew; None for a whole new one.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels outside the model's, more AR steps than tokens, more diffusion steps at the end than at the
            beginning, an edit that does not fit the model.
    """
    run = begin("mar", model, condition, settings, noise, seed, edit)
    transformer = transformer or FullTransformer()
    with torch.no_grad():
        head = PlainHead(run, transformer)
    return (yield from generate(run, transformer, head))
