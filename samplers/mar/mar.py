"""Plain MAR: every token by a full diffusion pass. Source: Li et al. 2024 (arXiv 2406.11838), section 3.

Two options keep or approximate the result with less work: annealed diffusion steps (``disa.py``) and the self-speculative
diffusion head (``speculative.py``).
"""

from __future__ import annotations

import torch

from ...model_loaders.networks.mar import MARModel
from ..conditioning import MaskedCondition
from ..noise import Noise
from .disa import annealed_tables
from .editing import Edit
from .loop import Sampler, Transformer, begin, generate
from .settings import MARSettings
from .speculative import SpeculativeHead
from .transformer import FullTransformer


def mar(
    model: MARModel,
    condition: MaskedCondition,
    settings: MARSettings,
    noise: Noise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """Plain MAR.

    Args:
        model: network and the metadata of its file.
        condition: what B images show, of the kind that the model reads.
        settings: see :class:`MARSettings`.
        noise: noise of B images.
        seed: recorded in the report only.
        transformer: how the transformer is evaluated; None for in full.
        edit: part of a picture to sample again; None for a whole new one.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels outside the model's, more AR steps than tokens, more diffusion steps at the end than at the
            beginning, speculation together with a cached head, an edit that does not fit the model.
    """
    run = begin("mar", model, condition, settings, noise, seed, edit)
    transformer = transformer or FullTransformer()
    with torch.no_grad():
        head = SpeculativeHead.of(run, transformer, settings.speculation, annealed_tables(run, settings))
    return (yield from generate(run, transformer, head))
