"""LazyMAR: the transformer reuses features of earlier AR steps, and computes only rows that are new or have changed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). The numbers (8) to (10) are the numbers of the paper's equations.

In these files, a *row* is one vector of the encoder or the decoder: a token, or one of the *class rows*. The class rows
stand in front of the tokens (``../transformer.py`` calls them buffer rows). The first AR steps (*start_step*) and then
every tau-th AR step (*refresh_period*) are *refreshes*: encoder and decoder compute all rows of both branches of
guidance, and store features of these rows. A pass between two refreshes computes less, because it uses three caches.
:class:`CacheSettings` can switch off each cache. Below, k is the AR step of the pass, k' the AR step of the previous
pass, and r the AR step of the last refresh. The *new* tokens were decided since k', and the caller asks for the
*wanted* tokens; :class:`.RowSelection` has a picture.

1. *encoder cache*: the encoder computes only the class rows and the new tokens. It reads stored keys and values of the
   earlier tokens. The published code has this cache, but the paper does not mention it.
2. *token cache* (section 3.2.1): up to the *measuring block*, the decoder computes all rows. The attention values V of
   this block show how much row i has changed since the previous pass. The later blocks compute only some rows:

   - similarity: s_i = cos(V_i^k, V_i^k'), averaged over the attention heads;
   - (8): the pass computes the rows of the wanted tokens, the rows of the new tokens, and other rows with the lowest
     s_i. (The paper prints argmax, but the paper's text and code take the least similar rows.) ``schedule.py`` says how
     many rows a pass computes. :class:`.RowSelection` chooses the rows; it also has the other strategies of the
     paper's Table 3;
   - (9): in the later blocks, the computed rows also attend to the stored keys and values of all other rows.

   The measuring block is the 3rd layer in the paper, but the 4th block in the published code
   (:func:`.measuring_block`).
3. *condition cache* (section 3.2.2): the transformer computes only the conditional branch. The pass estimates the
   null branch, which does not read the class or prompt, from the conditional branch's features after the last block:

   - (10): residual = null^r - conditional^r;
   - null^k = conditional^k + residual.

The diffusion head has a fourth cache, in ``head.py``.

The caches only change how the transformer and the head compute, so they combine with MAR, GtR, FastHybrid and CSpD.
Differences from the published code:

- FastAR always computes the rows of the wanted and the new tokens. In the published code, rows of negative similarity
  can displace these rows.
- From the 65th AR step on, FastAR computes the same share of rows as at the 64th. The published code fails at the 65th.
- FastAR stores keys and values only for the blocks after the measuring block, because all earlier blocks compute all
  rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch

from ....networks.mar import MARModel
from ...conditioning import ClassOrPrompt
from ...editing import Edit
from ...engine import Sampler
from ...noise import PairedNoise
from ..canvas import MARCanvas
from ..mar import check as check_mar
from ..mar import expect_full_head, mar
from ..settings import MARBase
from .settings import CacheSettings, LazyMARSettings, head_period
from .transformer import LazyTransformer


def lazymar(
    model: MARModel,
    condition: ClassOrPrompt,
    settings: LazyMARSettings,
    noise: PairedNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with MAR and LazyMAR's caches; see :func:`samplers.mar.mar.mar` for arguments and errors. If
    ``refresh_period`` is 1, the images are bit-identical to the images of MAR.
    """
    return mar(model, condition, settings, noise, partial(lazy_transformer, settings=settings), edit)


def lazy_transformer(canvas: MARCanvas, settings: CacheSettings) -> LazyTransformer:
    """The transformer with LazyMAR's caches, for a sampler's ``make_transformer``. Also calls :func:`note_caches`."""
    note_caches(canvas, settings)
    return LazyTransformer(canvas, settings)


def note_caches(canvas: MARCanvas, settings: CacheSettings) -> None:
    """Write LazyMAR and its settings into the report of a run, and start to count how often the caches are used.

    The report's ``sampler`` becomes "lazymar", or "SAMPLER+lazymar" for a SAMPLER other than MAR. If the token cache is
    on, :attr:`MARCanvas.cached` counts how often each token comes from the cache. The report shows these counts as a
    map.
    """
    report = canvas.report
    report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
    report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
    report.add(cached_calls=0)
    if settings.refresh_period > 1 and settings.token_cache:
        canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)


def with_caches(sampler: Callable[..., Sampler], *transformer_arguments: str) -> Callable[..., Sampler]:
    """Add LazyMAR's caches to a MAR sampler. The settings of the result include the fields of :class:`CacheSettings`
    (``settings.py``).

    ``transformer_arguments``: names of the sampler's arguments that make a transformer. CSpD has two such arguments,
    "make_transformer" and "make_draft_transformer"; all other samplers have only the first.
    """

    def run(model: Any, condition: Any, settings: Any, noise: Any, **more: Any) -> Sampler:
        make_transformer = partial(lazy_transformer, settings=settings)
        lazy = dict.fromkeys(transformer_arguments, make_transformer)
        return sampler(model, condition, settings, noise, **lazy, **more)

    return run


def check(model: MARModel, settings: MARBase, caches: CacheSettings | None = None) -> None:
    """Check the settings of a sampler and of its caches against a model, before anything is loaded or computed.

    ``caches``: the settings of the caches; None if the class of ``settings`` also has their fields.

    Raises:
        UserError: see :func:`samplers.mar.mar.check`; also if speculation is combined with the cache of the head.
    """
    if caches is None:
        caches = cast(CacheSettings, settings)
    check_mar(model, settings)
    expect_full_head(settings, head_period(caches, settings.diffusion_steps) == 1)
