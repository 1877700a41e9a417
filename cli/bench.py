"""Time samplers against each other.

The runs are paired and interleaved (A B A B ...): every repeat runs each sampler on the same noise, one after the
other, so that whatever slows the machine down slows them all. A ratio is the median of the repeats' ratios to the
baseline; the spread beside it is the smallest and the largest. Each sampler runs one untimed AR step first. With
--random the network has an official size and random weights: good for seconds, meaningless for pictures and for the
acceptance rate.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import UserError
from ..model_loaders.checkpoint import choose_dtype
from ..model_loaders.networks.mar import MAR, MARConfig, MARModel, initialise
from ..reports.record import VERSION, Report
from ..samplers.conditioning import Condition, from_ids
from .running import (
    MOST_IMAGES,
    Planned,
    choose_device,
    defaults,
    draw,
    load,
    model_options,
    output,
    plan,
    sampler_options,
    warm_up,
    whole,
    with_draft,
)

# Official sizes (Li et al. 2024, table of models): width, depth of encoder and of decoder, heads, head depth and width.
SIZES = {"MAR-B": (768, 12, 12, 6, 1024), "MAR-L": (1024, 16, 16, 8, 1280), "MAR-H": (1280, 20, 16, 12, 1536)}
_COLUMNS = (
    "batch",
    "sampler",
    "seconds",
    "s / image",
    "ratio",
    "spread",
    "transformer",
    "head",
    "head calls",
    "accepted",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    model_options(parser)
    sampler_options(parser)
    parser.add_argument("--random", choices=list(SIZES), help="an official size with random weights instead of --model")
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="timed runs of each sampler; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table (Markdown)")


def official(size: str) -> MARConfig:
    """Shape of an official size."""
    dim, depth, heads, head_depth, head_width = SIZES[size]
    return MARConfig(
        dim=dim, encoder_depth=depth, decoder_depth=depth, heads=heads, buffer=64, tokens=256, channels=16, classes=1000,
        head_depth=head_depth, head_width=head_width,
    )  # fmt: skip


def random_model(size: str, dtype: str, device: torch.device) -> MARModel:
    """A MAR of an official size with random weights; always the same; global random state is not touched."""
    config = official(size)
    compute = choose_dtype(dtype, device)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = initialise(MAR(config)).eval().requires_grad_(False)
    last = net.head.final_layer.linear
    net = net.to(device, compute)
    last.float()
    return MARModel(net, f"{size}, random weights", t_max=950)


def run(options: argparse.Namespace) -> int:
    """Time and tell."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats = whole(options.repeats, "repeats", 1, 1000)
    table, numbers = output(options.out, "out", (".md", ".txt")), output(options.json, "json", (".json",))
    plan(options.samplers, options.sets, options.steps, {})
    if options.random:
        model = random_model(options.random, options.dtype, choose_device(options.device))
        metadata: dict[str, str] = {}
    else:
        model, _, metadata = load(options)
    demo = model.label_set == "picture-book"
    planned = with_draft(plan(options.samplers, options.sets, options.steps, defaults(model, metadata), demo), options)
    found = [_measure(model, planned, batch, repeats) for batch in batches]
    device = next(model.net.parameters()).device
    text = "\n".join([_about(model, device, repeats), "", _table(found, planned)])
    print(text)
    if table:
        table.write_text(text + "\n", encoding="utf-8")
    if numbers:
        about = {"version": VERSION, "device": device.type, "machine": _machine(device), "model": model.name}
        found_all = {**about, "repeats": repeats, "batches": found}
        numbers.write_text(json.dumps(found_all, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(model: MARModel, planned: list[Planned], batch: int, repeats: int) -> dict[str, Any]:
    """Every sampler ``repeats`` times, interleaved; all timings and their medians."""
    classes = model.net.config.classes
    condition: Condition = from_ids([i % classes for i in range(batch)])
    for p in planned:
        warm_up(p, model, condition)
    runs: list[list[Report]] = [[] for _ in planned]
    for repeat in range(repeats):
        for reports, p in zip(runs, planned, strict=True):
            report = draw(p, model, condition, repeat).report
            if not report.seconds:
                raise UserError(f"{p.entry.name}: its run took no measurable time; raise --batch or --steps.")
            reports.append(report)
    out = []
    for p, reports in zip(planned, runs, strict=True):
        ratios = [a.seconds / b.seconds for a, b in zip(runs[0], reports, strict=True)]
        seconds = [r.seconds for r in reports]
        accepted = [r.acceptance for r in reports if r.acceptance is not None]
        phases = {name: round(median(r.phases[name] for r in reports), 6) for name in reports[0].phases}
        counts = {name: round(median(r.counts.get(name, 0) for r in reports)) for name in reports[0].counts}
        entry: dict[str, Any] = {
            "sampler": p.entry.name, "variant": p.variant, "settings": asdict(p.settings), "seconds": [round(s, 6) for s in seconds],
            "median_seconds": round(median(seconds), 6), "seconds_per_image": round(median(seconds) / batch, 6),
            "ratio": round(median(ratios), 4), "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "counts": counts, "phases": phases, "peak_memory_bytes": reports[-1].peak_memory_bytes,
        }  # fmt: skip
        if accepted:
            entry["acceptance"] = round(median(accepted), 6)
        out.append(entry)
    return {"batch": batch, "runs": out}


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _about(model: MARModel, device: torch.device, repeats: int) -> str:
    about = _machine(device)
    threads = f", {about['threads']} threads" if device.type == "cpu" else ""
    machine = f"{about['name']}{threads}, torch {about['torch']}"
    return f"{model.name} on {device.type} ({machine}); medians of {repeats}, interleaved"


def _table(found: list[dict[str, Any]], planned: list[Planned]) -> str:
    rows = [list(_COLUMNS)]
    for group in found:
        for entry, p in zip(group["runs"], planned, strict=True):
            low, high = entry["ratio_range"]
            phases = entry["phases"]
            rows.append([
                str(group["batch"]), p.label, f"{entry['median_seconds']:.3f}", f"{entry['seconds_per_image']:.3f}",
                f"{entry['ratio']:.2f}x", f"{low:.2f}-{high:.2f}", f"{phases.get('transformer', 0):.3f}",
                f"{phases.get('head', 0):.3f}", str(entry["counts"].get("head_calls", "")),
                f"{100 * entry['acceptance']:.1f} %" if "acceptance" in entry else "",
            ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
