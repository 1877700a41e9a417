"""Ablation tables of the MAR samplers on the demo's MAR."""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...model_loaders.autoencoders import load_kl
from ...model_loaders.mar import load_mar
from ...model_loaders.networks.autoencoder import KLModel
from ...model_loaders.networks.mar import MARModel
from ...reports.record import Report
from ...samplers import presets
from ...samplers.conditioning import MaskedCondition
from ...samplers.driver import finish
from ...samplers.mar.settings import LazyMARSettings
from ...samplers.noise import PairedNoise
from ...samplers.registry import find
from ..training.quality import Figures, percent
from ..training.recipes import DEFAULTS, to_rgb
from .tables import BATCH, TEST_SEED, Bench, Result, Row, Table, from_rgb

_LAMBDAS = (0.0, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
_COMMON = {name: DEFAULTS[name] for name in ("steps", "diffusion_steps", "cfg", "temperature")}
_K = {name: DEFAULTS[name] for name in ("lookahead", "guided_steps")}
LAZY = {"refresh_period": 5, "start_step": 4}  # the paper's values for 32 AR steps
_NO_CACHE = dict.fromkeys(("encoder_cache", "token_cache", "condition_cache", "head_cache"), False)
_FAST = presets.values(LazyMARSettings, "fast", demo=True)
_DRAFT = {"draft_length": 8, "prefill_ratio": 0.15}

TABLES: dict[str, Table] = {
    "mar": (Row("MAR", "mar", {}),),
    "fasthybrid-threshold": (
        Row("MAR", "mar", {}),
        *(Row(f"RG-{v:g}", "fasthybrid", {**_K, "threshold": v}) for v in _LAMBDAS),
        *(Row(f"R-{v:g}", "fasthybrid", {**_K, "threshold": v, "accepted": "keep"}) for v in (0.8, 0.95)),
    ),
    "fasthybrid-guidance": (
        Row("MAR", "mar", {}),
        *(Row(f"MAR-D{n}", "mar", {"diffusion_steps": n}) for n in (25, 10, 5)),
        *(
            Row(s, "fasthybrid", {**_K, "threshold": 0.95, "guidance_schedule": s})
            for s in ("cos", "linear-down", "square", "linear-up", "none")
        ),
    ),
    "fasthybrid-lookahead": (
        Row("MAR", "mar", {}),
        *(Row(f"k = {k}", "fasthybrid", {**_K, "threshold": 0.95, "lookahead": k}) for k in (2, 4, 8, 16)),
        *(Row(f"T_g = {n}", "fasthybrid", {**_K, "threshold": 0.95, "guided_steps": n}) for n in (3, 10)),
    ),
    "mar-settings": (
        *(Row(f"cfg {c:g}", "mar", {"cfg": c}) for c in (1.0, 1.5, 2.0, 3.0)),
        *(Row(f"{n} AR steps", "mar", {"steps": n}) for n in (8, 16, 64)),
        *(Row(f"temperature {t:g}", "mar", {"temperature": t}) for t in (0.7, 0.9, 1.0)),
        Row("raster order", "mar", {"order": "raster"}),
        Row("t_max 999", "mar", {"t_max": 999}),
    ),
    "lazymar-caches": (
        Row("MAR", "mar", {}),
        *(
            Row(title, "lazymar", {**LAZY, **_NO_CACHE, **dict.fromkeys(names, True)})
            for title, names in (
                ("encoder cache", ("encoder_cache",)),
                ("token cache", ("token_cache",)),
                ("condition cache", ("condition_cache",)),
                ("token + condition (the paper's)", ("token_cache", "condition_cache")),
                ("head cache", ("head_cache",)),
                ("all four (the code's)", tuple(_NO_CACHE)),
            )
        ),
    ),
    "lazymar-tokens": (
        *(
            Row(f"ratio {r:g}", "lazymar", {**LAZY, "head_cache": False, "computed_ratio": r})
            for r in (1.0, 0.6, 0.3, 0.15, 0.05)
        ),
        *(
            Row(f"refresh every {n}", "lazymar", {**LAZY, "head_cache": False, "refresh_period": n})
            for n in (2, 5, 9, 32)
        ),
        *(Row(f"head period {n}", "lazymar", {**LAZY, "head_period": n}) for n in (2, 4, 7, 14)),
    ),
    "cspd": (
        Row("MAR", "mar", {}),
        *(Row(m, "cspd", {**_DRAFT, "mode": m}) for m in ("lossless", "published")),
        Row("published, no alignment", "cspd", {**_DRAFT, "mode": "published", "alignment": False}),
        *(
            Row(f"published, pre-fill {100 * r:g} %", "cspd", {**_DRAFT, "mode": "published", "prefill_ratio": r})
            for r in (0.0, 0.05)
        ),
        *(
            Row(f"published, gamma {n}", "cspd", {**_DRAFT, "mode": "published", "draft_length": n})
            for n in (4, 16, 32)
        ),
        *(Row(f"published, cfg {c:g}", "cspd", {**_DRAFT, "mode": "published", "cfg": c}) for c in (1.0, 4.0)),
        *(
            Row(f"published, temperature {t:g}", "cspd", {**_DRAFT, "mode": "published", "temperature": t})
            for t in (0.6, 1.0)
        ),
        *(
            Row(f"published, inner T {t:g}", "cspd", {**_DRAFT, "mode": "published", "inner_temperature": t})
            for t in (1.0, 10.0)
        ),
    ),
    "fasthybrid-batches": (
        Row("MAR", "mar", {}),
        Row("lambda 0.95", "fasthybrid", {**_K, "threshold": 0.95}),
        Row("lambda 0.95, lookahead_start 8", "fasthybrid", {**_K, "threshold": 0.95, "lookahead_start": 8}),
        Row("lambda 0.99", "fasthybrid", {**_K, "threshold": 0.99}),
    ),
    "few-steps": (
        Row("MAR", "mar", {}),
        Row("fast: 12 AR steps, Halton order, DiSA 25 to 5, LazyMAR", "lazymar", _FAST),
        Row("fast, random order", "lazymar", {**_FAST, "order": "random"}),
        Row("12 AR steps, halton order", "mar", {"steps": 12, "order": "halton"}),
        Row("12 AR steps, random order", "mar", {"steps": 12}),
    ),
    "accelerators": (
        Row("MAR", "mar", {}),
        Row("DiSA 50 to 5", "mar", {"diffusion_steps_end": 5}),
        Row("speculation, L = 8", "mar", {"speculation": 8}),
        Row("FastHybrid", "fasthybrid", {**_K, "threshold": 0.95}),
        Row("LazyMAR", "lazymar", LAZY),
        Row("FastHybrid + LazyMAR", "fasthybrid+lazymar", {**_K, "threshold": 0.95, **LAZY}),
        Row("CSpD, published", "cspd", {**_DRAFT, "mode": "published"}),
        Row("CSpD, published + LazyMAR", "cspd+lazymar", {**_DRAFT, "mode": "published", **LAZY}),
    ),
}


class MARBench(Bench):
    """Rows of the demo's MAR and its draft model."""

    tables, common = TABLES, _COMMON

    def needs(self, row: Row) -> tuple[str, ...]:
        return ("mar", "kl", *(("mar-draft",) if find(row.sampler).needs_draft else ()))

    @cached_property
    def mar(self) -> MARModel:
        """The model."""
        return load_mar(self.ground.file("mar"), self.dtype, self.device)

    @cached_property
    def draft(self) -> MARModel:
        """The draft model."""
        return load_mar(self.ground.file("mar-draft"), self.dtype, self.device)

    @cached_property
    def kl(self) -> KLModel:
        """The autoencoder."""
        return load_kl(self.ground.file("kl"), device=self.device)

    @cached_property
    def _floors(self) -> dict[str, Figures]:
        # Scenes that the reference does not contain.
        real = self.ground.real(TEST_SEED + 1)
        with torch.no_grad():
            means = (self.kl.net.encode(part.to(self.device))[0] for part in from_rgb(real).split(BATCH))
            rebuilt = np.concatenate([to_rgb(self.kl.net.decode(mean)) for mean in means])
        return {"real": self.ground.figures(real), "rebuilt": self.ground.figures(rebuilt)}

    def floors(self, name: str) -> dict[str, Figures]:
        return self._floors

    def condition(self, images: range) -> MaskedCondition:
        """Condition of the images with these indices."""
        return self.ground.condition(images)

    def draw(self, row: Row, settings: Any, images: range) -> tuple[np.ndarray, Report]:
        entry = find(row.sampler)
        more = {"draft": self.draft} if entry.needs_draft else {}
        noise = PairedNoise(self.ground.seed, images)
        latents, report = finish(entry.run(self.mar, self.condition(images), settings, noise, **more))
        return to_rgb(self.kl.net.decode(latents)), report

    def work(self, result: Result) -> dict[str, str]:
        calls = result.counts.get("head_calls", 0)
        return {
            "accepted %": percent(result.acceptance),
            "transformer rows an image": result.count("transformer_tokens"),
            "head rows an image": result.count("head_rows"),
            "s an image": result.seconds_an_image,
            "head calls a batch": f"{calls / result.batches:.0f}" if calls else "",
            "cache kB an image": result.cache,
        }
