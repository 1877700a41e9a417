"""Plain MAR: every token by a full diffusion pass. Source: Li et al. 2024 (arXiv 2406.11838), section 3.

Two options keep or approximate the result with less work: fewer diffusion steps for later tokens (DiSA, Zhao et al.
2025, arXiv 2505.20297, section 3.2, and its code), and speculation in the diffusion head (``speculative.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ..conditioning import MaskedCondition
from ..driver import to_device
from ..editing import Edit
from ..noise import CounterRNG, PairedNoise, row_keys
from .diffusion import HeadBatch
from .loop import FullTransformer, Run, Sampler, Step, Transformer, begin
from .settings import DiSASettings, MARBase, MARSettings
from .speculative import Paths
from .tables import STEPS, Tables

# Where fewer than so many steps remain at the end and t_max is 0, all tables start at t = 950 or below, as in the
# authors' code: from 999 they would multiply the head's error by thousands (tables.py).
FEW_STEPS = 30
CLIPPED = 950
# Share of the annealed steps by progress u = 0..1.
CURVES = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "two-stage": lambda u: float(u < 0.5),
}


def mar(
    model: MARModel,
    condition: MaskedCondition,
    settings: MARSettings,
    noise: PairedNoise,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """Plain MAR.

    Args:
        model: network and the metadata of its file.
        condition: what B images show, of the kind that the model reads.
        settings: see :class:`MARSettings`.
        noise: noise of B images.
        transformer: how the transformer is evaluated; None for in full.
        edit: part of an image to sample again; None for a whole new one.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels outside the model's, more AR steps than tokens, speculation together with a cached head, an
            edit that does not fit the model.
    """
    transformer = transformer or FullTransformer()
    run = begin("mar", model, condition, settings, noise, edit, transformer)
    yield from plain_steps(run, transformer, annealed_tables(run, settings), settings.speculation)
    return run.finish()


def expect_whole_head(settings: MARBase, transformer: Transformer) -> None:
    """Check that speculation, which evaluates the head at many diffusion steps at once, does not meet a cached head.

    Raises:
        UserError: it does.
    """
    speculates = getattr(settings, "speculation", 0) and settings.temperature > 0
    if speculates and transformer.caches_head(settings.diffusion_steps):
        raise UserError(
            "speculation: it cannot be combined with head_cache; switch head_cache off, or set speculation to 0."
        )


@torch.no_grad()
def plain_steps(
    run: Run, transformer: Transformer, tables: Sequence[Tables], speculation: int = 0, stop: int | None = None
) -> Iterator[Step]:
    """The AR steps of plain MAR, with the diffusion tables of each; up to step ``stop``, None for all."""
    expect_whole_head(run.settings, transformer)
    window = speculation if run.settings.temperature > 0 else 0
    plan = run.plan
    start, noise = run.draws("full", len(run.tables.steps))
    keys = to_device(row_keys(run.noise, "verify", plan.tokens), start.device)
    images = torch.arange(len(start), device=start.device)

    for step, table in enumerate(tables[:stop]):
        here = plan.ahead(step)  # [B, n]

        # 1. The conditions of this AR step's tokens.
        with run.clock.phase("transformer"):
            z = transformer(run, step, here)  # [P, B, n, C]

        # 2. Every token by diffusion: T steps, or fewer for later tokens (DiSA).
        with run.clock.phase("head"):
            b = images.repeat_interleave(here.shape[1])
            p = here.flatten()
            batch = HeadBatch(z.flatten(1, 2), plan.scale[b, p, None], start[b, p], noise[:, b, p], table)
            if window:
                paths = Paths(run, batch, window, CounterRNG(keys[b, p]))
                tokens = paths.finish(np.arange(len(b)))
            else:
                tokens = transformer.denoise(run, batch)
            run.tokens[b, p] = tokens

        with run.clock.paused():
            yield run.step(step)


def annealed_steps(first: int, last: int, curve: str, ar_steps: int) -> list[int]:
    """Diffusion steps of AR steps s = 0 .. S - 1: last + floor(curve(s / (S - 1)) (first - last)).

    ``last`` at ``first`` or above keeps ``first``.
    """
    if last >= first or ar_steps == 1:
        return [first] * ar_steps
    out = []
    for s in range(ar_steps):
        share = CURVES[curve](s / (ar_steps - 1))
        # Rounded before the floor: 1 - u of a whole fraction may fall short of it in the last bit.
        out.append(last + math.floor(round(share * (first - last), 9)))
    return out


def clips(settings: DiSASettings) -> bool:
    """Whether diffusion steps fall to so few that a run which chooses no ``t_max`` starts at a lower timestep."""
    last = settings.diffusion_steps_end
    return last is not None and last < FEW_STEPS


def annealed_tables(run: Run, settings: DiSASettings) -> list[Tables]:
    """Diffusion tables of every AR step."""
    first = run.settings.diffusion_steps
    last = first if settings.diffusion_steps_end is None else settings.diffusion_steps_end
    clipped = run.settings.t_max is None and clips(settings)
    highest = CLIPPED if clipped else STEPS - 1
    counts = annealed_steps(first, last, settings.diffusion_steps_curve, run.plan.steps)
    made = {count: run.table(count, highest) for count in set(counts)}
    return [made[count] for count in counts]
