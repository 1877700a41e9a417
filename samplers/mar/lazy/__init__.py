"""LazyMAR: the transformer reuses features of earlier AR steps, and computes only rows that are new or have changed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). The numbers (8) to (10) are the numbers of the paper's equations.

Some passes are *refreshes*: encoder and decoder compute everything, and store features. All other passes are *reuse
passes*: they reuse the stored features, and compute less. AR steps 0 to *start_step* are refreshes, and then every
tau-th AR step (*refresh_period*). For example, with a start_step of 5 and a period of 9::

    AR step    0 ... 4     5         6       7       8       ...   13      14        15      ...
    pass       refreshes   refresh   reuse   reuse   reuse         reuse   refresh   reuse
                           r                 k'      k

Below, k is the AR step of a reuse pass, k' the AR step of the pass before it, and r the AR step of the last refresh.

A *row* is one vector of the encoder or the decoder: a token, or one of the *class rows*, which stand in front of the
tokens (``../transformer.py`` calls them buffer rows). The *wanted* tokens are those whose conditions z the caller asks
for, usually all tokens that AR step k decides. The *new* tokens were decided at the AR steps k' to k - 1, so the pass
at k is the first pass that reads them. :class:`.RowSelection` has a picture.

The transformer has three caches. :class:`CacheSettings` can switch off each of them.

1. The *encoder cache* stores the encoder's keys and values of the decided tokens. A reuse pass encodes only the class
   rows and the new tokens. Its error: the encoder's output for an earlier token does not react to newer tokens before
   the next refresh. The published code has this cache, but the paper does not mention it.
2. The *token cache* (section 3.2.1) stores keys and values of all rows in the decoder's *later blocks*. These are the
   blocks after the *measuring block* (:func:`.measuring_block`). A reuse pass computes all rows up to the measuring
   block, but only some rows in the later blocks: the wanted rows, the new rows, and the rows that have changed most.
   There, the computed rows also attend to the stored keys and values of all other rows (9). Its error: the stored keys
   and values of a row come from the last pass that computed this row in the later blocks.

   The attention values V of the measuring block show how much row i has changed since k'. The similarity is
   s_i = cos(V_i^k, V_i^k'), averaged over the attention heads. The rows of lowest s_i have changed most (8).
   ``schedule.py`` says how many rows a reuse pass computes. :class:`.RowSelection` chooses the rows; it also has the
   other strategies of the paper's Table 3.
3. The *condition cache* (section 3.2.2) stores residual = null^r - conditional^r (10). It is the difference between the
   features of the two branches of guidance after the decoder's last block. A reuse pass computes only the conditional
   branch, and estimates the null branch, which does not read the class or prompt: null^k = conditional^k + residual.
   Its error: the residual is that of AR step r.

The diffusion head has a fourth cache, which reuses results of earlier diffusion steps. The files in reading order:
``settings.py``; ``schedule.py``, what is known before the first AR step; ``transformer.py``, the three caches; and
``head.py``, the fourth cache.

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
from typing import Any

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

    The report's ``sampler`` becomes "lazymar", or "SAMPLER+lazymar" for a SAMPLER other than MAR.
    """
    report = canvas.report
    report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
    report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
    report.add(cached_calls=0)


def with_caches(sampler: Callable[..., Sampler], *transformer_arguments: str) -> Callable[..., Sampler]:
    """Add LazyMAR's caches to a MAR sampler. The settings of the result include the fields of :class:`CacheSettings`
    (``settings.py``).

    ``transformer_arguments``: names of the sampler's arguments that make a transformer. CSpD has two such arguments;
    all other samplers have only "make_transformer". In this example, the first two lines do the same as the others::

        lazy_cspd = with_caches(cspd, "make_transformer", "make_draft_transformer")
        lazy_cspd(model, condition, settings, noise, draft=draft)

        f = partial(lazy_transformer, settings=settings)
        cspd(model, condition, settings, noise, make_transformer=f, make_draft_transformer=f, draft=draft)
    """

    def run(model: MARModel, condition: ClassOrPrompt, settings: Any, noise: PairedNoise, **more: Any) -> Sampler:
        make_transformer = partial(lazy_transformer, settings=settings)
        keywords: dict[str, Any] = {name: make_transformer for name in transformer_arguments}
        return sampler(model, condition, settings, noise, **keywords, **more)

    return run


def check(model: MARModel, settings: LazyMARSettings) -> None:
    """Check the settings of LazyMAR against a model, before anything is loaded or computed.

    Raises:
        UserError: see :func:`check_caches`.
    """
    check_caches(model, settings, settings)


def check_caches(model: MARModel, settings: MARBase, caches: CacheSettings) -> None:
    """Check the settings of a sampler and of its caches against a model.

    In ComfyUI, the settings of a sampler and of its caches come from two nodes, so ``checked_cache`` in
    ``nodes/caches.py`` has two objects. All other callers have one object with the fields of both, and pass it twice.

    Raises:
        UserError: see :func:`samplers.mar.mar.check`; also if speculation is combined with the cache of the head.
    """
    check_mar(model, settings)
    expect_full_head(settings, head_period(caches, settings.diffusion_steps) == 1)
