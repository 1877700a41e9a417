"""Time samplers against each other.

The runs are paired and interleaved (A B B A ...): every repeat runs each sampler on the same noise, one after the
other, so that other load on the machine affects all of them. The speed-up of a sampler is the median of its ratios to
the baseline of its family, the plain sampler, over the repeats, with the smallest and the largest. If some ratios are
above 1 and others below, there is no measurable difference. Each sampler runs an untimed step first. Models that read a
prompt draw "a red boat at sunset" unless --prompt gives another.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from ..errors import UserError
from ..reports.files import Result, as_text, output, save
from ..reports.record import LONGEST_NOTE, VERSION, Report, repeated
from ..reports.table import literal, markdown, percent
from ..reports.timing import Speedup
from ..runs.limits import MOST_IMAGES
from ..samplers.conditioning import AnyCondition, from_ids
from .conditions import conditions
from .options import model_options, sampler_options, whole
from .planning import Planned, measured_against, prepare, with_draft
from .running import in_turn, warm_up

PROMPT_TEXT = "a red boat at sunset"
# What a run is prepared to: the samplers with their models, and the settings of prompts.
Prepared = tuple[list[Planned], dict[str, str]]
_HEAD = (
    "batch, sampler, passes, head calls, accepted, seconds, s / image, speed-up, spread, transformer, head, sampling"
)


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Options for models, samplers and prompts."""
    model_options(parser)
    sampler_options(parser)

    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        dest="text",
        help="prompt for models that read text; may be repeated, and the images then use the prompts in turn",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes, separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="number of timed runs of each sampler; default 5")
    parser.add_argument("--json", metavar="FILE", help="also write all times to this file")


def run(options: argparse.Namespace, planned_for: Callable[[argparse.Namespace], Prepared] = prepare) -> int:
    """Run the command; returns the exit code.

    Args:
        planned_for: makes the samplers with their models, and the settings of prompts, of the options.
    """
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

    threads: list[int] = []
    for group in found:
        threads += [run["threads"] for run in group["runs"] if run["threads"] is not None]

    print(about(models, device, repeats, threads))
    print()
    print(_table(found, planned, repeats))

    notes = _notes(found, planned)
    if notes:
        print("", *notes, sep="\n")

    if unsaved:
        raise UserError(unsaved)
    return 0


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
        prompts = options.text or [PROMPT_TEXT]
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
    for _, i, made in in_turn(planned, what, range(repeats)):
        if not made.report.seconds:
            raise UserError(f"{planned[i].entry.name}: this sampler ran too briefly to be timed; use a larger --batch.")
        runs[i].append(made.report)

    medians = [repeated(reports) for reports in runs]
    out = []
    for i, base in enumerate(measured_against(planned)):
        out.append(_figures(planned[i], runs[i], medians[i], None if base is None else medians[base], batch))

    return {"batch": batch, "runs": out}


def _figures(p: Planned, reports: list[Report], medians: Report, baseline: Report | None, batch: int) -> dict[str, Any]:
    """The timings of a sampler's repeats, their medians, and the speed-up over the baseline if there is one."""
    speedup = medians.speedup(baseline) or Speedup()

    out: dict[str, Any] = {
        "sampler": p.entry.name,
        "variant": p.variant,
        "model": p.on.model.name,
        "settings": asdict(p.settings),
        "seconds": [round(report.seconds, 6) for report in reports],
        "median_seconds": round(medians.seconds, 6),
        "seconds_per_image": round(medians.seconds / batch, 6),
        "ratio": _rounded(speedup.value),
        "ratio_range": [_rounded(speedup.low), _rounded(speedup.high)],
        "ratio_note": speedup.note,
        "counts": medians.counts,
        "phases": {name: round(seconds, 6) for name, seconds in medians.phases.items()},
        "peak_memory_bytes": medians.peak_memory_bytes,
        "threads": medians.threads,
        "dtype": medians.dtype,
    }

    note = " ".join(dict.fromkeys(report.note for report in reports if report.note))
    if note:
        out["note"] = note

    acceptances = [report.acceptance for report in reports if report.acceptance is not None]
    if acceptances:
        out["acceptance"] = round(median(acceptances), 6)

    return out


def _rounded(ratio: float | None) -> float | None:
    """A ratio for JSON."""
    return None if ratio is None else round(ratio, 4)


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, version of PyTorch and threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()

    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def about(name: str, device: torch.device, repeats: int, threads: Sequence[int] = ()) -> str:
    """The line above a table.

    Args:
        threads: of the runs on a CPU, if they are not PyTorch's own number: small networks take one.
    """
    found = machine(device)
    numbers = sorted(set(threads)) or [found["threads"]]
    words = " or ".join(map(str, numbers)) + (" thread" if numbers == [1] else " threads")
    where = ", ".join([found["name"], *([words] if device.type == "cpu" else []), f"torch {found['torch']}"])
    times = f"medians of {repeats}, interleaved" if repeats > 1 else "one run each"

    return f"{literal(name)} on {device.type} ({where}); {times}"


def _notes(found: list[dict[str, Any]], planned: list[Planned]) -> list[str]:
    """The remarks of the runs, a line each."""
    notes = []
    for group in found:
        for p, timed in zip(planned, group["runs"], strict=True):
            if "note" in timed:
                note = literal(timed["note"], LONGEST_NOTE)
                notes.append(f"note: {literal(p.label)}, batch {group['batch']}: {note}")

    return notes


def _table(found: list[dict[str, Any]], planned: list[Planned], repeats: int) -> str:
    """The table of all batches and samplers."""
    rows = [_HEAD.split(", ")]

    for group in found:
        for entry, p in zip(group["runs"], planned, strict=True):
            speedup = _told(entry, repeats)
            row = [str(group["batch"]), p.label]
            for count in ("transformer_passes", "head_calls"):
                row.append(str(entry["counts"].get(count, "")))
            row.append(percent(entry.get("acceptance"), 1))

            row += [f"{entry['median_seconds']:.3f}", f"{entry['seconds_per_image']:.3f}"]
            row += [speedup.short, speedup.range] if speedup is not None else ["", ""]
            for phase in ("transformer", "head", "sampling"):
                row.append(f"{entry['phases'][phase]:.3f}" if phase in entry["phases"] else "")

            rows.append(row)

    return markdown(rows, empty=False)


def _told(entry: Mapping[str, Any], repeats: int) -> Speedup | None:
    """The speed-up of a run, from its JSON form; None without a baseline."""
    if entry["ratio"] is None and not entry["ratio_note"]:
        return None

    low, high = entry["ratio_range"]
    return Speedup(entry["ratio"], low, high, repeats, note=entry["ratio_note"])
