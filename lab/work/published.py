"""Print the speed-ups that papers headline beside counts of the same configuration.

A paper's figure is of seconds on its GPU, or of operations. Here are the passes, head calls and operations of the same
model, AR steps and settings, counted as in :mod:`.preset_work`: so an author finds which count a headline follows.
Controls are rows of plain sampling with fewer steps, which a method has to beat.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ...model_loaders.catalogue import hub
from ...reports.table import markdown
from ...runs import registry
from ...samplers.settings import settings_from
from . import preset_work
from .preset_work import Cost, Row, short

# The configurations of the papers.
_MAR = {"steps": 64, "diffusion_steps": 100}
_FEWER = {"diffusion_steps": 50, "diffusion_steps_end": 20, "t_max": 950}  # GtR's
_LAZY = {**_MAR, "refresh_period": 9, "start_step": 5, "computed_ratio": 0.05}
_256 = {"steps": 256, "diffusion_steps": 100}


@dataclass(frozen=True)
class Published:
    """A row: what a paper measured, or a control beside it."""

    entry: str  # of the catalogue
    sampler: str
    title: str  # method and configuration
    paper: str = ""  # the paper's speed-up, and of what; "" for a control
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # settings
    plain: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of the plain sampler
    preset: str = ""  # whose settings these are; else ``values`` alone
    accepted: float | None = None  # share of drafts, where it is simulated
    images: int = 1  # of the batch; calls are the batch's, operations an image's


def _cspd(length: int, accepted: float, paper: str) -> Published:
    """CSpD at the acceptance of its Table 1."""
    values = {**_256, "mode": "published", "draft_length": length, "prefill_ratio": 0.15}
    title = f"CSpD, 256 AR steps, draft length {length}"
    return Published("mar-huge", "cspd", title, f"{paper} in s, batch 256", values, _256, accepted=accepted)


def _fasthybrid(entry: str, k: int, accepted: float, images: int, paper: str = "") -> Published:
    values = {**_MAR, "lookahead": k, "threshold": 0.8, "guided_steps": 10}
    batch = f"batch of {images}" if images > 1 else "1 image"
    title = f"FastHybrid, k {k}, {batch}, {100 * accepted:g} % of the drafts accepted"
    speedup = f"{paper} in s, batch 8" if paper else ""
    return Published(entry, "fasthybrid", title, speedup, values, _MAR, accepted=accepted, images=images)


def _mulosd(preset: str) -> Published:
    paper = "3.90 (Tar-1.5B) and 5.33 (Tar-7B) in s, end to end"
    return Published("ar-dtok-1024", "mulosd", f"MuLo-SD 4x, {preset}", paper, preset=preset)


ROWS = (
    _fasthybrid("mar-base", 7, 0.99, 8, "1.97"),
    *(_fasthybrid("mar-base", 7, share, 8) for share in (0.995, 0.98, 0.9)),
    *(_fasthybrid("mar-base", 7, share, 1) for share in (0.995, 0.99, 0.98, 0.9)),
    Published(
        "mar-base",
        "mar",
        "MAR, 24 diffusion steps, t_max 950",
        "",
        {**_MAR, "diffusion_steps": 24, "t_max": 950},
        _MAR,
    ),
    _fasthybrid("mar-large", 8, 0.99, 8, "1.92"),
    _fasthybrid("mar-huge", 9, 0.99, 8, "1.69"),
    Published("mar-huge", "lazymar", "LazyMAR, 64 AR steps", "2.83 in operations", _LAZY, _MAR),
    Published("mar-huge", "gtr", "GtR, 17 AR steps", "3.72 in operations", {**_FEWER, "steps": 17}, _MAR),
    Published(
        "mar-huge",
        "gtr",
        "GtR, 18 AR steps, 2 of reconstruction",
        "3.72 in operations",
        {**_FEWER, "steps": 18, "reconstruction_steps": 2},
        _MAR,
    ),
    Published("mar-huge", "mar", "MAR, GtR's 17 AR steps and diffusion steps", "", {**_FEWER, "steps": 17}, _MAR),
    _cspd(32, 0.19, "2.33"),
    _cspd(16, 0.26, "2.20"),
    _cspd(8, 0.27, "1.96"),
    Published("mar-huge", "mar", "MAR, 64 AR steps instead of 256", "", _MAR, _256),
    Published("par-xxl-4x", "par", "PAR-XXL-4x", "3.6 in s"),
    Published("par-3b-16x", "par", "PAR-3B-16x", "9.5 in s, of PAR-XXL-16x"),
    _mulosd("balanced"),
    _mulosd("fast"),
    Published("ar-dtok-1024", "zipar", "ZipAR, window 16", "3.65 in s (Tar-1.5B), end to end", {"window": 16}),
)
# The plain sampler of a PAR is a LlamaGen of its size and grid.
_PLAIN_ENTRY = {"par-xxl-4x": "llamagen-xxl-384", "par-3b-16x": "llamagen-3b-384"}
HEAD = (
    "model",
    "method",
    "the paper's speed-up",
    "passes",
    "plain / this",
    "head calls",
    "plain / this",
    "TFLOP",
    "plain / this",
)


def costs_of(row: Published) -> tuple[Cost, Cost]:
    """What an image costs by a row, and by the plain sampler."""
    plain_entry = _entry(_PLAIN_ENTRY.get(row.entry, row.entry))
    plain = preset_work.rows_of(plain_entry)[0].sampler
    own = _cost(row.entry, row)
    own = replace(own, flops=own.flops / row.images)
    return own, _plain_cost(plain_entry.id, plain, tuple(row.plain.items()))


def _cost(entry: str, row: Published) -> Cost:
    if row.preset:
        return Row(_entry(entry), row.sampler, row.preset).cost()
    settings = settings_from(registry.find(row.sampler).settings, row.values)
    return preset_work.cost(_entry(entry), row.sampler, settings, row.accepted, row.images)


@lru_cache(maxsize=16)
def _plain_cost(entry: str, sampler: str, values: tuple[tuple[str, Any], ...]) -> Cost:
    settings = settings_from(registry.find(sampler).settings, dict(values))
    return preset_work.cost(_entry(entry), sampler, settings)


def _entry(name: str) -> hub.Entry:
    return next(entry for entry in preset_work.networks() if entry.id == name)


def line(row: Published, own: Cost, plain: Cost) -> list[str]:
    """A row of the table."""
    cells = [row.entry, row.title, row.paper]
    cells += [f"{own.passes:,}", f"{plain.passes / own.passes:.2f}"]
    cells += [f"{own.head_calls:,}", f"{plain.head_calls / own.head_calls:.2f}"] if own.head_calls else ["", ""]
    cells += [short(own.flops / 1e12), f"{plain.flops / own.flops:.2f}"]
    return cells


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--models", metavar="NAMES", help="entries of the catalogue, separated by commas; default all")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    names = None if options.models is None else options.models.split(",")
    rows = [row for row in ROWS if names is None or row.entry in names]
    print(markdown([list(HEAD), *(line(row, *costs_of(row)) for row in rows)], empty=False))
    return 0
