"""The papers' ablations on the demo: tables of settings, each judged on the same seeds and labels.

Quality does not depend on the batch (noise is paired per image), so pictures are made in large batches here; speed is
measured by ``bench``, in one paired run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders.autoencoders import load_kl
from ..model_loaders.mar import load_mar
from ..reports.record import Report
from ..samplers.conditioning import Condition
from ..samplers.masked import finish
from ..samplers.noise import PairedNoise
from ..samplers.registry import find
from ..samplers.settings import make
from . import picture_book
from .judge import load_judge, read
from .quality import Figures, figures
from .recipes import DEFAULTS

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SEED, TEST_SEED = 2026, 2


@dataclass(frozen=True)
class Row:
    """One line of a table: what it is called, which sampler, which settings on top of the table's own."""

    title: str
    sampler: str
    settings: dict[str, Any]


_LAMBDAS = (0.0, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
_COMMON = {name: DEFAULTS[name] for name in ("ar_steps", "diffusion_steps", "cfg", "temperature")}
_K = {name: DEFAULTS[name] for name in ("lookahead", "guided_steps")}
_LAZY = {"refresh_period": 5, "start_step": 4}  # the paper's for 32 AR steps
_NO_CACHE = dict.fromkeys(("encoder_cache", "token_cache", "condition_cache", "head_cache"), False)
_DRAFT = {"draft_length": 8, "prefill_ratio": 0.15}

TABLES: dict[str, tuple[dict[str, Any], tuple[Row, ...]]] = {
    "mar": (_COMMON, (Row("MAR", "mar", {}),)),
    "fasthybrid-threshold": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(Row(f"RG-{v:g}", "fasthybrid", {**_K, "threshold": v}) for v in _LAMBDAS),
            *(Row(f"R-{v:g}", "fasthybrid", {**_K, "threshold": v, "accepted": "keep"}) for v in (0.8, 0.95)),
        ),
    ),
    "fasthybrid-guidance": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(Row(f"MAR-D{n}", "mar", {"diffusion_steps": n}) for n in (25, 10, 5)),
            *(
                Row(s, "fasthybrid", {**_K, "threshold": 0.95, "guidance_schedule": s})
                for s in ("cos", "linear-down", "square", "linear-up", "none")
            ),
            Row("cos, x0 space", "fasthybrid", {**_K, "threshold": 0.95, "guidance_space": "x0"}),
        ),
    ),
    "fasthybrid-lookahead": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(Row(f"k = {k}", "fasthybrid", {**_K, "threshold": 0.95, "lookahead": k}) for k in (2, 4, 8, 16)),
            *(Row(f"T_g = {n}", "fasthybrid", {**_K, "threshold": 0.95, "guided_steps": n}) for n in (3, 10)),
        ),
    ),
    "mar-settings": (
        _COMMON,
        (
            *(Row(f"cfg {c:g}", "mar", {"cfg": c}) for c in (1.0, 1.5, 2.0, 3.0)),
            *(Row(f"{n} AR steps", "mar", {"ar_steps": n}) for n in (8, 16, 64)),
            *(Row(f"temperature {t:g}", "mar", {"temperature": t}) for t in (0.7, 0.9, 1.0)),
            Row("raster order", "mar", {"order": "raster"}),
            Row("t_max 999", "mar", {"t_max": 999}),
        ),
    ),
    "lazymar-caches": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(
                Row(title, "lazymar", {**_LAZY, **_NO_CACHE, **dict.fromkeys(names, True)})
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
    ),
    "lazymar-strategy": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(
                Row(s, "lazymar", {**_LAZY, "head_cache": False, "strategy": s})
                for s in ("lazymar", "random", "min-similarity", "predicted-only", "unpredicted-only")
            ),
        ),
    ),
    "lazymar-tokens": (
        _COMMON,
        (
            *(Row(f"ratio {r:g}", "lazymar", {**_LAZY, "head_cache": False, "computed_ratio": r}) for r in (1.0, 0.6, 0.3, 0.15, 0.05)),
            *(Row(f"refresh every {n}", "lazymar", {**_LAZY, "head_cache": False, "refresh_period": n}) for n in (2, 5, 9, 32)),
            *(Row(f"head period {n}", "lazymar", {**_LAZY, "head_period": n}) for n in (2, 4, 7, 14)),
        ),
    ),
    "cspd": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            *(Row(m, "cspd", {**_DRAFT, "mode": m}) for m in ("lossless", "paper", "published")),
            Row("published, no alignment", "cspd", {**_DRAFT, "mode": "published", "alignment": False}),
            *(Row(f"published, pre-fill {100 * r:g} %", "cspd", {**_DRAFT, "mode": "published", "prefill_ratio": r}) for r in (0.0, 0.05)),
            *(Row(f"published, gamma {n}", "cspd", {**_DRAFT, "mode": "published", "draft_length": n}) for n in (4, 16, 32)),
            *(Row(f"published, cfg {c:g}", "cspd", {**_DRAFT, "mode": "published", "cfg": c}) for c in (1.0, 4.0)),
            *(Row(f"published, temperature {t:g}", "cspd", {**_DRAFT, "mode": "published", "temperature": t}) for t in (0.6, 1.0)),
            *(Row(f"published, inner T {t:g}", "cspd", {**_DRAFT, "mode": "published", "inner_temperature": t}) for t in (1.0, 10.0)),
        ),
    ),
    "accelerators": (
        _COMMON,
        (
            Row("MAR", "mar", {}),
            Row("DiSA 50 to 5", "mar", {"diffusion_steps_end": 5}),
            Row("speculation, L = 8", "mar", {"speculation": 8}),
            Row("FastHybrid", "fasthybrid", {**_K, "threshold": 0.95}),
            Row("LazyMAR", "lazymar", _LAZY),
            Row("FastHybrid + LazyMAR", "fasthybrid+lazymar", {**_K, "threshold": 0.95, **_LAZY}),
            Row("CSpD, published", "cspd", {**_DRAFT, "mode": "published"}),
            Row("CSpD, published + LazyMAR", "cspd+lazymar", {**_DRAFT, "mode": "published", **_LAZY}),
        ),
    ),
}


@dataclass(frozen=True)
class Result:
    """A row's figures; counts and seconds are sums over batches."""

    title: str
    sampler: str
    settings: dict[str, Any]
    figures: Figures
    counts: dict[str, int]
    acceptance: float | None
    seconds: float


def to_rgb(y: Tensor) -> np.ndarray:
    """Decoder output [N, 3, H, W] in -1..1 to uint8 [N, H, W, 3]."""
    return ((y.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def balanced_labels(images: int) -> np.ndarray:
    """Labels 0..9 in turn, int64 [images]."""
    return np.arange(images) % len(picture_book.LABELS)


class Bench:
    """Models, judge and reference features, loaded once for many rows."""

    def __init__(self, images: int, device: str = "cpu", checkpoints: Path = CHECKPOINTS, dtype: str = "fp32"):
        if images < 100:
            raise UserError(f"images: {images} is too few for figures; use 100 or more.")
        self.images, self.device = images, torch.device(device)
        self._rows: dict[str, tuple[Result, np.ndarray]] = {}
        self.mar = load_mar(checkpoints / "mar.safetensors", dtype, device)
        self.draft = load_mar(checkpoints / "mar-draft.safetensors", dtype, device)
        self.kl = load_kl(checkpoints / "kl.safetensors", device=device)
        self.judge, self.tolerance = load_judge(checkpoints / "judge.safetensors")
        self.labels = balanced_labels(images)
        real, _ = picture_book.render(picture_book.scenes(TEST_SEED, images, labels=self.labels))
        self.reference = read(self.judge, real).features

    @torch.no_grad()
    def floors(self) -> dict[str, Figures]:
        """Real pictures and rebuilt pictures (other scenes than the reference's), judged like generated ones."""
        s = picture_book.scenes(TEST_SEED + 1, self.images, labels=self.labels)
        real, _ = picture_book.render(s)
        x = torch.from_numpy(real).permute(0, 3, 1, 2).float() / 127.5 - 1
        rebuilt = []
        for part in x.split(100):
            mean, _ = self.kl.net.encode(part.to(self.device))
            rebuilt.append(to_rgb(self.kl.net.decode(mean)))
        judged = (("real", real), ("rebuilt", np.concatenate(rebuilt)))
        return {name: figures(self.judge, self.tolerance, rgb, self.labels, self.reference) for name, rgb in judged}

    @torch.no_grad()
    def pictures(self, sampler: str, settings: dict[str, Any], batch: int = 100) -> tuple[np.ndarray, Report]:
        """All pictures of a setting, uint8 [images, 64, 64, 3], and one report with the counts of all batches."""
        entry = find(sampler)
        made = make(entry.settings, settings)
        more = {"draft": self.draft} if entry.needs_draft else {}
        out, total = [], None
        for at in range(0, self.images, batch):
            labels = self.labels[at : at + batch]
            names = tuple(picture_book.LABELS[i] for i in labels)
            condition = Condition(tuple(int(i) for i in labels), names, "picture-book")
            result = finish(entry.run(self.mar, condition, made, PairedNoise(SEED, range(at, at + len(labels))), SEED, **more))
            out.append(to_rgb(self.kl.net.decode(result.latents)))
            total = _merge(total, result.report)
        assert total is not None
        return np.concatenate(out), total

    def row(self, row: Row, common: dict[str, Any]) -> tuple[Result, np.ndarray]:
        """Figures and pictures of one line; a line that several tables share is drawn once."""
        settings = {**common, **row.settings}
        key = f"{row.sampler} {make(find(row.sampler).settings, settings)}"
        if key not in self._rows:
            rgb, report = self.pictures(row.sampler, settings)
            judged = figures(self.judge, self.tolerance, rgb, self.labels, self.reference)
            self._rows[key] = Result(row.title, row.sampler, settings, judged, report.counts, report.acceptance, report.seconds), rgb
        result, rgb = self._rows[key]
        return replace(result, title=row.title), rgb


def _merge(total: Report | None, part: Report) -> Report:
    if total is None:
        return replace(part, counts=dict(part.counts))
    total.add(**part.counts)
    total.seconds += part.seconds
    total.images += part.images
    return total


def table(name: str) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """What all lines of a table share, and its lines.

    Raises:
        UserError: no such table.
    """
    if name not in TABLES:
        raise UserError(f"table: there is no {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name]


def run_table(
    bench: Bench, name: str, log: Callable[[str], None] = print, keep: list[np.ndarray] | None = None
) -> list[Result]:  # fmt: skip
    """All lines of a table.

    Args:
        bench: models and references.
        name: one of :data:`TABLES`.
        log: receives a line a row.
        keep: receives the first ten pictures of every row, uint8 [10, 64, 64, 3].

    Raises:
        UserError: no such table.
    """
    common, rows = table(name)
    out = []
    for row in rows:
        began = time.monotonic()
        result, rgb = bench.row(row, common)
        if keep is not None:
            keep.append(rgb[:10])
        log(f"{name}: {row.title}: {result.figures} in {time.monotonic() - began:.0f} s")
        out.append(result)
    return out


def to_markdown(results: Sequence[Result], floors: dict[str, Figures]) -> str:
    """The table docs/benchmarks.md shows; seconds are of batches of 100, without the decoder. Memory is of what a cache keeps."""
    work = ["accepted %", "transformer rows an image", "head rows an image", "s an image"]
    caching = any("cache_bytes" in r.counts for r in results)
    heads = ["setting", "class %", "scene %", "whole %", "Frechet", *work, *(["cache kB an image"] if caching else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]

    def line(title: str, f: Figures, *more: str) -> str:
        cells = [title, f"{100 * f.label:.1f}", f"{100 * f.scene:.1f}", f"{100 * f.whole:.1f}", f"{f.frechet:.2f}", *more]
        return f"| {' | '.join(cells + [''] * (len(heads) - len(cells)))} |"

    lines += [line(f"*{name} pictures*", f) for name, f in floors.items()]
    for r in results:
        accepted = "" if r.acceptance is None else f"{100 * r.acceptance:.1f}"
        rows = (f"{r.counts[name] / r.figures.images:.0f}" for name in ("transformer_tokens", "head_rows"))
        kept = [f"{r.counts['cache_bytes'] / r.figures.images / 1000:.0f}"] if "cache_bytes" in r.counts else []
        lines.append(line(r.title, r.figures, accepted, *rows, f"{r.seconds / r.figures.images:.3f}", *kept))
    return "\n".join(lines)
