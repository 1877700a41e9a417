"""Time samplers against each other.

The runs are paired and interleaved (A B A B ...): every repeat runs each sampler on the same noise, one after the
other, so that other load on the machine affects all of them. A ratio is the median of the repeats' ratios to the
baseline of the sampler's family (mar, llamagen, tar), with the smallest and the largest. Each sampler runs an untimed
step first. --random times a network of an official size with random weights, which is meaningful for seconds but not
for acceptance. Models that read a prompt draw "a red boat at sunset" unless --prompt names another.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.networks.speed import choose
from ..reports.files import Result, as_text, output, save
from ..reports.record import LONGEST_NOTE, VERSION, Report
from ..reports.table import literal, markdown
from ..samplers.conditioning import AnyCondition, from_ids
from ..samplers.registry import FAMILIES, LLAMAGEN, MAR, Entry
from .conditions import conditions
from .main import load_module
from .options import MOST_IMAGES, choose_device, model_options, sampler_options, whole
from .planning import Planned, measured_against, prepare, with_draft
from .running import draw, warm_up

_PROMPT = "a red boat at sunset"
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
    parser.add_argument("--json", metavar="FILE", help="also write every timing")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats = whole(options.repeats, "repeats", 1, 1000)
    numbers = output(options.json, "json", (".json",))

    planned, asked = planned_for(options)
    what = [conditions_of(planned, batch, options, asked) for batch in batches]
    planned = with_draft(planned, options)
    found = [_measure(planned, batch, repeats, drawn) for batch, drawn in zip(batches, what, strict=True)]

    device = planned[0].on.device
    models = ", ".join(dict.fromkeys(p.on.model.name for p in planned))

    # The file before the table: a reader of the table, such as head, may end this program.
    unsaved = ""
    if numbers:
        all_found = {
            "version": VERSION,
            "device": device.type,
            "machine": machine(device),
            "model": models,
            "repeats": repeats,
            "batches": found,
        }
        unsaved = save([Result("json", numbers, as_text(json.dumps(all_found, indent=2) + "\n"))])

    print(about(models, device, repeats))
    print()
    print(_table(found, planned))

    notes = _notes(found, planned)
    if notes:
        print("", *notes, sep="\n")

    if unsaved:
        raise UserError(unsaved)
    return 0


def planned_for(options: argparse.Namespace) -> tuple[list[Planned], dict[str, str]]:
    """See :func:`.planning.prepare`; with --random the models have random weights."""
    if not options.random:
        return prepare(options)

    if options.samplers is None:
        family = LLAMAGEN if options.random.startswith("LlamaGen") else MAR
        options.samplers = FAMILIES[family].usual

    return prepare(options, _random)


def _random(options: argparse.Namespace, entries: Sequence[Entry]) -> dict[str, Ready]:
    """Models of an official size with random weights, by sampler name."""
    sizes = load_module("..bench.sizes", "random: an official size")
    ready = sizes.random_models(options.random, entries, options.dtype, choose_device(options.device))

    for made in ready.values():
        choose(made.model.net, options.speed, made.device)

    return ready


def conditions_of(
    planned: Sequence[Planned], batch: int, options: argparse.Namespace, asked: Mapping[str, str]
) -> list[AnyCondition]:
    """The condition of each sampler: the prompts in turn, or consecutive classes."""
    readers = [p for p in planned if p.on.condition != "class"]
    if not readers and (options.text or asked):
        readers = list(planned)  # none reads text, which conditions() reports

    # The conditions of models that read text, by model.
    read: dict[int, AnyCondition] = {}
    if readers:
        prompts = options.text or [_PROMPT]
        texts = [prompts[i % len(prompts)] for i in range(batch)]
        made = conditions(readers, None, texts, 1, options, 0, asked)
        read = {id(p.on): condition for p, condition in zip(readers, made, strict=True)}

    found = []
    for p in planned:
        condition = read.get(id(p.on))
        if condition is None:
            condition = from_ids([i % p.on.classes for i in range(batch)])
        found.append(condition)

    return found


def _measure(planned: list[Planned], batch: int, repeats: int, what: list[AnyCondition]) -> dict[str, Any]:
    """Run every sampler ``repeats`` times, interleaved; all timings and their medians."""
    for p, condition in zip(planned, what, strict=True):
        warm_up(p, condition)

    runs: list[list[Report]] = [[] for _ in planned]
    for repeat in range(repeats):
        for reports, p, condition in zip(runs, planned, what, strict=True):
            report = draw(p, condition, repeat).report
            if not report.seconds:
                raise UserError(f"{p.entry.name}: its run took no measurable time; raise --batch.")
            reports.append(report)

    out = []
    for p, reports, base in zip(planned, runs, measured_against(planned), strict=True):
        out.append(_figures(p, reports, runs[base], batch))

    return {"batch": batch, "runs": out}


def _figures(p: Planned, reports: list[Report], baseline: list[Report], batch: int) -> dict[str, Any]:
    """The timings of a sampler's repeats, their medians, and their ratios to those of the baseline."""
    seconds = [report.seconds for report in reports]
    ratios = [base.seconds / report.seconds for base, report in zip(baseline, reports, strict=True)]

    counts = {}
    for name in reports[0].counts:
        counts[name] = round(median(report.counts.get(name, 0) for report in reports))

    phases = {}
    for name in reports[0].phases:
        phases[name] = round(median(report.phases[name] for report in reports), 6)

    out: dict[str, Any] = {
        "sampler": p.entry.name,
        "variant": p.variant,
        "model": p.on.model.name,
        "settings": asdict(p.settings),
        "seconds": [round(value, 6) for value in seconds],
        "median_seconds": round(median(seconds), 6),
        "seconds_per_image": round(median(seconds) / batch, 6),
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "counts": counts,
        "phases": phases,
        "peak_memory_bytes": reports[-1].peak_memory_bytes,
    }

    note = " ".join(dict.fromkeys(report.note for report in reports if report.note))
    if note:
        out["note"] = note

    acceptances = [report.acceptance for report in reports if report.acceptance is not None]
    if acceptances:
        out["acceptance"] = round(median(acceptances), 6)

    return out


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, version of PyTorch and threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()

    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def about(name: str, device: torch.device, repeats: int) -> str:
    """The line above a table."""
    found = machine(device)
    threads = f", {found['threads']} threads" if device.type == "cpu" else ""
    where = f"{found['name']}{threads}, torch {found['torch']}"

    return f"{literal(name)} on {device.type} ({where}); medians of {repeats}, interleaved"


def _notes(found: list[dict[str, Any]], planned: list[Planned]) -> list[str]:
    """The remarks of the runs, a line each."""
    notes = []
    for group in found:
        for p, timed in zip(planned, group["runs"], strict=True):
            if "note" in timed:
                note = literal(timed["note"], LONGEST_NOTE)
                notes.append(f"note: {literal(p.label)}, batch {group['batch']}: {note}")

    return notes


def _table(found: list[dict[str, Any]], planned: list[Planned]) -> str:
    """The table of all batches and samplers."""
    rows = [_HEAD.split(", ")]

    for group in found:
        for entry, p in zip(group["runs"], planned, strict=True):
            low, high = entry["ratio_range"]
            row = [
                str(group["batch"]),
                p.label,
                f"{entry['median_seconds']:.3f}",
                f"{entry['seconds_per_image']:.3f}",
                f"{entry['ratio']:.2f}x",
                f"{low:.2f}-{high:.2f}",
            ]

            for phase in ("transformer", "head", "sampling"):
                row.append(f"{entry['phases'][phase]:.3f}" if phase in entry["phases"] else "")
            for count in ("transformer_passes", "head_calls"):
                row.append(str(entry["counts"].get(count, "")))
            row.append(f"{100 * entry['acceptance']:.1f} %" if "acceptance" in entry else "")

            rows.append(row)

    return markdown(rows, empty=False)
