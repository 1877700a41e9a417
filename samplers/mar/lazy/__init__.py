"""LazyMAR: features are kept from one AR step to the next, and only new or changed rows are computed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). Every tau-th AR step is a *refresh*: encoder and decoder compute all rows, of both branches of guidance,
and their features are stored. A pass at AR step k between two refreshes computes less, thanks to three caches. Each
can be switched off (:class:`CacheSettings`):

1. *encoder cache*: the encoder computes the class rows and the tokens decided since the previous pass, with the stored
   keys and values of earlier tokens. It is in the published code, not in the paper.
2. *token cache* (section 3.2.1): the decoder computes all rows up to a chosen block, whose values V show how much
   row i has changed since the previous pass, and from there on only some rows:

   - similarity: s_i = cos(V_i^k, V_i^k'), averaged over the heads, where k' is the AR step of the previous pass;
   - (8): the pass computes the rows of the wanted tokens, which the caller asks for, of the tokens decided since k',
     and of further tokens with the lowest s_i. (The paper prints argmax, but its text and its code take the least
     similar rows.) ``schedule.py`` says how many; :class:`.RowSelection` also has the other strategies of the paper's
     Table 3;
   - (9): the blocks after the chosen one see the computed rows together with the stored keys and values of the other
     rows.

   The chosen block is the 3rd layer in the paper, but the 4th block in the published code.
3. *condition cache* (section 3.2.2): only the conditional branch is computed. After the last block, with both branches
   of the last refresh r:

   - (10): residual = null^r - conditional^r;
   - null^k = conditional^k + residual.

The diffusion head has a fourth cache, in ``head.py``.

The caches only change how the transformer and the head are evaluated, so they combine with plain MAR, FastHybrid and
CSpD. Differences from the published code:

- The rows of the wanted and the new tokens are always computed; there, rows of negative similarity can displace them.
- AR steps after the 64th compute the same share of rows as the 64th; there, the published code fails.
- The decoder's keys and values are stored only after the chosen block, since the blocks up to it compute all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

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
    """LazyMAR on plain MAR; arguments and errors as :func:`samplers.mar.mar.mar`. With ``refresh_period`` 1 it is plain
    MAR bit for bit.
    """
    return mar(model, condition, settings, noise, partial(lazy_transformer, settings=settings), edit)


def lazy_transformer(canvas: MARCanvas, settings: CacheSettings) -> LazyTransformer:
    """The transformer with LazyMAR's caches, for a sampler's ``make_transformer``; the report names the caches."""
    note_caches(canvas, settings)
    return LazyTransformer(canvas, settings)


def note_caches(canvas: MARCanvas, settings: CacheSettings) -> None:
    """Let the report of a run name LazyMAR, its settings, and how often its caches were used.

    The report's sampler becomes lazymar, or SAMPLER+lazymar. With the token cache, the canvas counts how often each
    token is taken from it (:attr:`MARCanvas.cached`), for a map of the report.
    """
    report = canvas.report
    report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
    report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
    report.add(cached_calls=0)
    if settings.refresh_period > 1 and settings.token_cache:
        canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)


def with_caches(sampler: Callable[..., Sampler], *models: str) -> Callable[..., Sampler]:
    """A MAR sampler that evaluates its models with LazyMAR's caches. ``models``: the names of the sampler's arguments
    that make a transformer, such as "make_transformer".
    """

    def run(model: Any, condition: Any, settings: Any, noise: Any, **more: Any) -> Sampler:
        lazy = {name: partial(lazy_transformer, settings=settings) for name in models}
        return sampler(model, condition, settings, noise, **lazy, **more)

    return run


def check(model: MARModel, settings: LazyMARSettings) -> None:
    """Check settings, which include the settings of the caches, against a model; see :func:`check_with_caches`."""
    check_with_caches(model, settings, caches=settings)


def check_with_caches(model: MARModel, settings: MARBase, caches: CacheSettings) -> None:
    """Check a sampler's settings and its caches' settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens, or speculation with a cached head.
    """
    check_mar(model, settings)
    expect_full_head(settings, head_period(caches, settings.diffusion_steps) == 1)
