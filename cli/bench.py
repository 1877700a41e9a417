"""Time samplers against each other.

The runs are paired and interleaved (A B A B ...): every repeat runs each sampler on the same noise, one after the other, so that other load
on the machine affects all of them. A ratio is the median of the repeats' ratios to the baseline of the sampler's family (mar, llamagen,
tar), with the smallest and the largest. Each sampler runs an untimed step first. --random times a network of an official size with random
weights, which is meaningful for seconds but not for acceptance. Models that draw from text get random rows unless --prompt names one.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.networks.speed import choose
from ..reports.record import VERSION, Report
from ..reports.table import markdown
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    FeatureCondition,
    PromptCondition,
    TextCondition,
    from_ids,
)
from ..samplers.registry import FAMILIES, LLAMAGEN, MAR
from .conditions import conditions, of_prompt
from .main import load_module
from .models import load, usual_samplers, with_draft
from .options import MOST_IMAGES, choose_device, model_options, output, sampler_options, save, whole
from .planning import Planned, measured_against, plan
from .running import draw, warm_up

# Rows of a random text condition; codes of a random Tar condition, at most; prompt of models that read one themselves.
TEXT_ROWS, CODES, _PROMPT = 20, 729, "a red boat at sunset"
_HEAD = "batch, sampler, seconds, s / image, ratio, spread, transformer, head, sampling, passes, head calls, accepted"


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Options for models, samplers and prompts."""
    model_options(parser)
    sampler_options(parser)
    parser.add_argument(
        "--random", metavar="SIZE", help="an official size (MAR-B, LlamaGen-XL, ...) with random weights; in a checkout"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        dest="text",
        help="what models that read text draw, in turn; may be repeated",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="timed runs of each sampler; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table (Markdown)")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats = whole(options.repeats, "repeats", 1, 1000)
    table, numbers = output(options.out, "out", (".md", ".txt")), output(options.json, "json", (".json",))
    planned, asked = prepare(options)
    what = [conditions_of(planned, batch, options, asked) for batch in batches]
    planned = with_draft(planned, options)
    found = [_measure(planned, batch, repeats, drawn) for batch, drawn in zip(batches, what, strict=True)]
    device, name = planned[0].on.device, ", ".join(dict.fromkeys(p.on.model.name for p in planned))
    rows = [(p, group["batch"], run) for group in found for p, run in zip(planned, group["runs"], strict=True)]
    notes = [f"note: {p.label}, batch {batch}: {run['note']}" for p, batch, run in rows if "note" in run]
    text = "\n".join([about(name, device, repeats), "", _table(found, planned), *([""] if notes else []), *notes])
    print(text)
    if table:
        save(table, lambda part: part.write_text(text + "\n", encoding="utf-8"))
    if numbers:
        all_found = {"version": VERSION, "device": device.type, "machine": machine(device), "model": name}
        all_found |= {"repeats": repeats, "batches": found}
        save(numbers, lambda part: part.write_text(json.dumps(all_found, indent=2) + "\n", encoding="utf-8"))
    return 0


def prepare(options: argparse.Namespace) -> tuple[list[Planned], dict[str, str]]:
    """The samplers with their models, without drafts, and the settings of Tar's language model."""
    if options.random and options.samplers is None:
        options.samplers = FAMILIES[LLAMAGEN if options.random.startswith("LlamaGen") else MAR].usual
    samplers = usual_samplers(options)
    sets, asked = of_prompt(options.sets)
    if asked and not options.text:
        raise UserError("set: without a prompt no codes are written; name one with --prompt.")
    entries = [p.entry for p in plan(samplers, sets, options.steps, {})]
    if not options.random:
        return plan(samplers, sets, options.steps, load(options, entries)), asked
    sizes = load_module("..bench.sizes", "random: an official size")
    ready = sizes.random_models(options.random, entries, options.dtype, choose_device(options.device))
    for made in ready.values():
        choose(made.model.net, options.speed, made.device)
    return plan(samplers, sets, options.steps, ready), asked


def _condition(on: Ready, batch: int) -> AnyCondition:
    """A condition without a prompt: consecutive classes, or random rows."""
    if not on.draws_from_text:
        return from_ids([i % on.classes for i in range(batch)])
    if on.condition == "prompt":
        return PromptCondition((_PROMPT,) * batch)
    g, names = torch.Generator().manual_seed(0), ("",) * batch
    if on.condition == "text":
        return TextCondition((torch.randn(TEXT_ROWS, on.classes, generator=g).to(on.device),) * batch, names)
    count = min(CODES, on.config.absolute - on.tokens + 1)
    if on.condition == "codes":
        return CodeCondition((torch.randint(on.classes, (count,), generator=g),) * batch, names)
    return FeatureCondition((torch.randn(count, on.classes, generator=g).to(on.device),) * batch, names)


def conditions_of(
    planned: Sequence[Planned], batch: int, options: argparse.Namespace, asked: Mapping[str, str]
) -> list[AnyCondition]:
    """The condition of each sampler: the prompts in turn, or :func:`_condition`."""
    read: dict[int, AnyCondition] = {}
    if options.text:
        readers = [p for p in planned if p.on.draws_from_text] or planned  # if none reads text, conditions() reports it
        texts = [options.text[i % len(options.text)] for i in range(batch)]
        made = conditions(readers, None, texts, 1, options, 0, asked)
        read = {id(p.on): condition for p, condition in zip(readers, made, strict=True)}
    return [read[id(p.on)] if id(p.on) in read else _condition(p.on, batch) for p in planned]


def _measure(planned: list[Planned], batch: int, repeats: int, what: list[AnyCondition]) -> dict[str, Any]:
    """Run every sampler ``repeats`` times, interleaved; all timings and their medians."""
    for p, condition in zip(planned, what, strict=True):
        warm_up(p, condition)
    runs: list[list[Report]] = [[] for _ in planned]
    for repeat in range(repeats):
        for reports, p, condition in zip(runs, planned, what, strict=True):
            reports.append(draw(p, condition, repeat).report)
            if not reports[-1].seconds:
                raise UserError(f"{p.entry.name}: its run took no measurable time; raise --batch.")
    out = []
    for p, reports, base in zip(planned, runs, measured_against(planned), strict=True):
        ratios = [a.seconds / b.seconds for a, b in zip(runs[base], reports, strict=True)]
        accepted = [r.acceptance for r in reports if r.acceptance is not None]
        entry: dict[str, Any] = {
            "sampler": p.entry.name,
            "variant": p.variant,
            "model": p.on.model.name,
            "settings": asdict(p.settings),
            "seconds": [round(r.seconds, 6) for r in reports],
            "median_seconds": round(median(r.seconds for r in reports), 6),
            "seconds_per_image": round(median(r.seconds for r in reports) / batch, 6),
            "ratio": round(median(ratios), 4),
            "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "counts": {name: round(median(r.counts.get(name, 0) for r in reports)) for name in reports[0].counts},
            "phases": {name: round(median(r.phases[name] for r in reports), 6) for name in reports[0].phases},
            "peak_memory_bytes": reports[-1].peak_memory_bytes,
        }
        note = " ".join(dict.fromkeys(r.note for r in reports if r.note))
        entry |= {"note": note} if note else {}
        entry |= {"acceptance": round(median(accepted), 6)} if accepted else {}
        out.append(entry)
    return {"batch": batch, "runs": out}


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, version of PyTorch and threads."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def about(name: str, device: torch.device, repeats: int) -> str:
    """The line above a table."""
    found = machine(device)
    threads = f", {found['threads']} threads" if device.type == "cpu" else ""
    where = f"{found['name']}{threads}, torch {found['torch']}"
    return f"{name} on {device.type} ({where}); medians of {repeats}, interleaved"


def _table(found: list[dict[str, Any]], planned: list[Planned]) -> str:
    rows = [_HEAD.split(", ")]
    for group in found:
        for entry, p in zip(group["runs"], planned, strict=True):
            low, high = entry["ratio_range"]
            phases = [f"{entry['phases'][n]:.3f}" if n in entry["phases"] else "" for n in rows[0][6:9]]
            row = [str(group["batch"]), p.label, f"{entry['median_seconds']:.3f}", f"{entry['seconds_per_image']:.3f}"]
            row += [f"{entry['ratio']:.2f}x", f"{low:.2f}-{high:.2f}", *phases]
            row += [str(entry["counts"].get(n, "")) for n in ("transformer_passes", "head_calls")]
            rows.append([*row, f"{100 * entry['acceptance']:.1f} %" if "acceptance" in entry else ""])
    return markdown(rows, empty=False)
