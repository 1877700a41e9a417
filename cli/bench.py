"""Time samplers against each other.

The runs are paired and interleaved (A B A B ...): every repeat runs each sampler on the same noise, one after the other, so that
other load on the machine affects all of them. A ratio is the median of the repeats' ratios to the baseline of the sampler's
family (mar, llamagen, tar); the range gives the smallest and the largest. Each sampler runs an untimed step first. A batch for
which memory is insufficient is sampled in parts; its seconds are the sum of the parts, and a note below the table says so. With
--random the network has an official size and random weights, which is meaningful for seconds but not for pictures or acceptance
rates. Models that draw from text get random rows, which say nothing about acceptance either; with --prompt, Tar's language model
and LlamaGen's text encoder compute the real ones, untimed.

--against times a reference implementation instead of other samplers: a checkout of MAR, LazyMAR, CSpD, LlamaGen, PAR, ZipAR or Tar,
with the random weights of --random. The results are compared first. --ops counts the operations of one run of each sampler, unless
its batch is sampled in parts.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.checkpoint import choose_dtype
from ..model_loaders.hybrid import precision
from ..model_loaders.networks import llama, mar
from ..model_loaders.networks.llama import Llama, LlamaConfig, TokenModel
from ..model_loaders.networks.mar import MAR, MARConfig, MARModel
from ..model_loaders.networks.speed import choose
from ..reports.record import VERSION, Report
from ..samplers.batches import SPLIT
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    FeatureCondition,
    PromptCondition,
    TextCondition,
    from_ids,
)
from ..samplers.registry import HYBRID, LLAMAGEN, TAR, Entry
from ..samplers.registry import MAR as MAR_FAMILY
from . import bench_against as against
from .bench_references import DTOK_SIZES, identify, pair
from .bench_work import counted, measure_speed
from .conditions import conditions, of_prompt
from .hybrids import SIZES as HYBRID_SIZES
from .hybrids import count, random_hybrid
from .models import USUAL, load, usual_samplers, with_draft
from .options import MOST_IMAGES, choose_device, model_options, output, sampler_options, save, whole
from .planning import Planned, measured_against, plan
from .running import draw, warm_up

# Official sizes (Li et al. 2024, table of models): width, depth of encoder and of decoder, attention heads, head depth and width.
SIZES = {"MAR-B": (768, 12, 12, 6, 1024), "MAR-L": (1024, 16, 16, 8, 1280), "MAR-H": (1280, 20, 16, 12, 1536)}
# LlamaGen and PAR (Sun et al. 2024, table of models): width, depth, heads, and the grid of the official files.
TOKEN_SIZES = {
    "LlamaGen-B": (768, 12, 12, 16),
    "LlamaGen-L": (1024, 24, 16, 16),
    "LlamaGen-XL": (1280, 36, 20, 24),
    "LlamaGen-XXL": (1536, 48, 24, 24),
    "LlamaGen-3B": (3200, 24, 32, 24),
}
# Transition tokens of the PAR that --random uses: PAR-4x.
PAR_SPECIAL = 3
# Rows of a random text condition; codes of a random Tar condition, at most.
TEXT_ROWS, CODES = 20, 729
# Prompt of models that read one themselves, if none is given.
_PROMPT = "a red boat at sunset"
_COLUMNS = (
    "batch",
    "sampler",
    "seconds",
    "s / image",
    "ratio",
    "spread",
    "transformer",
    "head",
    "sampling",
    "passes",
    "head calls",
    "accepted",
    "operations",
    "waits",
    "floor",
    "TFLOP / image",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    sampler_options(parser)
    parser.add_argument(
        "--random",
        choices=[*SIZES, *TOKEN_SIZES, *HYBRID_SIZES, *DTOK_SIZES],
        help="an official size with random weights instead of --model; AR-DTok only with --against",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        dest="text",
        help="what models that read text draw, in turn; may be repeated",
    )
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="timed runs of each sampler; default 5")
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        metavar="DIR",
        help="checkout of a reference implementation, timed with the same random weights; may be repeated",
    )
    parser.add_argument(
        "--ops", action="store_true", help="also count operations, and the least time for them on this CPU"
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="print the operations and the memory of a picture of every official Harmon and UniPic; nothing is computed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table (Markdown)")


def official(size: str) -> MARConfig:
    """Configuration of an official size of MAR."""
    dim, depth, heads, head_depth, head_width = SIZES[size]
    return MARConfig(
        dim=dim,
        encoder_depth=depth,
        decoder_depth=depth,
        heads=heads,
        buffer=64,
        tokens=256,
        channels=16,
        classes=1000,
        head_depth=head_depth,
        head_width=head_width,
    )


def official_gpt(size: str, special: int = 0) -> LlamaConfig:
    """Configuration of an official size of LlamaGen; with ``special`` transition tokens, of a PAR."""
    dim, depth, heads, _ = TOKEN_SIZES[size]
    # Two thirds of four times the width, up to the next multiple of 256.
    hidden = -(-(8 * dim // 3) // 256) * 256
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        hidden=hidden,
        vocab=16384,
        condition="class",
        condition_size=1000,
        special=special,
    )


def random_model(size: str, dtype: str, device: torch.device, special: int = 0) -> Ready:
    """A model of an official size with random weights from a fixed seed. The global random state is not changed."""
    tokens = size in TOKEN_SIZES
    compute = choose_dtype(dtype, device, bf16=tokens)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        if size in HYBRID_SIZES:
            return Ready(HYBRID, random_hybrid(size, precision(dtype, device), device))
        if tokens:
            net = llama.initialise(Llama(official_gpt(size, special))).eval().requires_grad_(False)
            net.output.weight.normal_(
                std=0.02
            )  # zero, the initial value in training, would make all tokens equally likely
            name = f"{size.replace('LlamaGen', 'PAR')}-4x" if special else size
            return Ready(LLAMAGEN, TokenModel(net.to(device, compute), f"{name}, random weights", TOKEN_SIZES[size][3]))
        head = mar.initialise(MAR(official(size))).eval().requires_grad_(False)
    last = head.head.final_layer.linear
    head = head.to(device, compute)
    last.float()
    return Ready(MAR_FAMILY, MARModel(head, f"{size}, random weights", t_max=950))


def random_models(size: str, entries: Iterable[Entry], dtype: str, device: torch.device) -> dict[str, Ready]:
    """Random models by sampler name; PAR gets a PAR of that size.

    Raises:
        UserError: a sampler is for another family.
    """
    family = LLAMAGEN if size in TOKEN_SIZES else HYBRID if size in HYBRID_SIZES else MAR_FAMILY
    made: dict[int, Ready] = {}
    out = {}
    for entry in entries:
        if family not in entry.families:
            raise UserError(f"samplers: {entry.name} samples {entry.models}, but {size} is not one; leave it out.")
        special = PAR_SPECIAL if entry.name == "par" else 0
        made[special] = made.get(special) or random_model(size, dtype, device, special)
        out[entry.name] = made[special]
    return out


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats = whole(options.repeats, "repeats", 1, 1000)
    table, numbers = output(options.out, "out", (".md", ".txt")), output(options.json, "json", (".json",))
    if options.count:
        text = count(options.text[0] if options.text else _PROMPT)
        print(text)
        if table:
            save(table, lambda part: part.write_text(text + "\n", encoding="utf-8"))
        return 0
    if options.against and options.random in HYBRID_SIZES:
        raise UserError(f"random: {options.random} cannot be timed beside a checkout; leave --against out.")
    if options.against:
        return _against(options, batches, repeats, table, numbers)
    if options.random in DTOK_SIZES:
        raise UserError(f"random: {options.random} is timed beside Tar only; give a checkout of it with --against.")
    if options.random and options.samplers is None:
        options.samplers = USUAL[LLAMAGEN if options.random in TOKEN_SIZES else MAR_FAMILY]  # Harmon's are MAR's
    samplers = usual_samplers(options)
    sets, asked = of_prompt(options.sets)
    if asked and not options.text:
        raise UserError("set: without a prompt no codes are written; name one with --prompt.")
    entries = [p.entry for p in plan(samplers, sets, options.steps, {})]
    if options.random:
        ready = random_models(options.random, entries, options.dtype, choose_device(options.device))
        for made in ready.values():
            choose(made.model.net, options.speed, made.device)
    else:
        ready = load(options, entries)
    planned = plan(samplers, sets, options.steps, ready)
    what = [_conditions(planned, batch, options, asked) for batch in batches]
    planned = with_draft(planned, options)
    found = [_measure(planned, batch, repeats, drawn, options.ops) for batch, drawn in zip(batches, what, strict=True)]
    device = planned[0].on.device
    name = ", ".join(dict.fromkeys(p.on.model.name for p in planned))
    notes = _notes(found, planned)
    text = "\n".join([_about(name, device, repeats), "", _table(found, planned), *([""] if notes else []), *notes])
    print(text)
    if table:
        save(table, lambda part: part.write_text(text + "\n", encoding="utf-8"))
    if numbers:
        about = {"version": VERSION, "device": device.type, "machine": _machine(device), "model": name}
        found_all = {**about, "repeats": repeats, "batches": found}
        save(numbers, lambda part: part.write_text(json.dumps(found_all, indent=2) + "\n", encoding="utf-8"))
    return 0


def _condition(on: Ready, batch: int) -> AnyCondition:
    """A condition without a prompt: consecutive classes, or random rows."""
    if not on.draws_from_text:
        return from_ids([i % on.classes for i in range(batch)])
    if on.family == HYBRID:
        return PromptCondition((_PROMPT,) * batch)
    g, names = torch.Generator().manual_seed(0), ("",) * batch
    if on.family != TAR:
        return TextCondition((torch.randn(TEXT_ROWS, on.classes, generator=g).to(on.device),) * batch, names)
    count = min(CODES, on.config.absolute - on.tokens + 1)
    if on.config.condition == "codes":
        return CodeCondition((torch.randint(on.classes, (count,), generator=g),) * batch, names)
    return FeatureCondition((torch.randn(count, on.classes, generator=g).to(on.device),) * batch, names)


def _conditions(
    planned: list[Planned], batch: int, options: argparse.Namespace, asked: Mapping[str, str]
) -> list[AnyCondition]:
    """The condition of each sampler: the prompts in turn, or :func:`_condition`."""
    read: dict[int, AnyCondition] = {}
    if options.text:
        readers = [p for p in planned if p.on.draws_from_text] or planned  # if none reads text, conditions() reports it
        texts = [options.text[i % len(options.text)] for i in range(batch)]
        read = {
            id(p.on): made
            for p, made in zip(readers, conditions(readers, None, texts, 1, options, 0, asked), strict=True)
        }
    return [read[id(p.on)] if id(p.on) in read else _condition(p.on, batch) for p in planned]


def _against(
    options: argparse.Namespace, batches: list[int], repeats: int, table: Path | None, numbers: Path | None
) -> int:
    """Time reference implementations; returns the exit code."""
    device = choose_device(options.device)
    if device.type != "cpu":
        raise UserError(f"against: references are timed on a CPU, not on {device.type}; add --device cpu.")
    if options.samplers:
        raise UserError("against: the sampler is the checkout's; leave --samplers out.")
    sets = dict(text.split("=", 1) for text in options.sets if "=" in text)
    if options.steps:
        sets["ar_steps"] = str(options.steps)
    checkouts = [identify(folder) for folder in options.against]
    found = []
    for name, root in checkouts:
        usual = {"mar": "MAR-B", "lazymar": "MAR-B", "cspd": "MAR-B", "tar": "AR-DTok-B"}.get(name, "LlamaGen-B")
        size = options.random or usual
        if (size in DTOK_SIZES, size in SIZES) != (usual in DTOK_SIZES, usual in SIZES):
            raise UserError(f"random: {name} has no size {size}; leave it out, which is {usual}.")
        model = None
        if name != "tar":
            model = random_model(size, "fp32", device, PAR_SPECIAL if name == "par" else 0).model
        for batch in batches:
            found.append(against.measure(pair(name, root, model, size, batch, sets), repeats))
    text = "\n".join([_about("Random weights", device, repeats), "", against.table(found)])
    print(text)
    if table:
        table.write_text(text + "\n", encoding="utf-8")
    if numbers:
        against.write(numbers, {"version": VERSION, "device": device.type, "machine": _machine(device)}, found)
    return 0


def _measure(
    planned: list[Planned], batch: int, repeats: int, what: list[AnyCondition], operations: bool = False
) -> dict[str, Any]:
    """Run every sampler ``repeats`` times, interleaved; all timings and their medians.

    Args:
        batch: images of each condition.
        what: condition of each sampler.
        operations: whether to count the operations of a further run of each sampler.
    """
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
    speed = measure_speed() if operations and planned[0].on.device.type == "cpu" else None
    for p, reports, base, condition in zip(planned, runs, measured_against(planned), what, strict=True):
        ratios = [a.seconds / b.seconds for a, b in zip(runs[base], reports, strict=True)]
        seconds = [r.seconds for r in reports]
        accepted = [r.acceptance for r in reports if r.acceptance is not None]
        phases = {name: round(median(r.phases[name] for r in reports), 6) for name in reports[0].phases}
        counts = {name: round(median(r.counts.get(name, 0) for r in reports)) for name in reports[0].counts}
        entry: dict[str, Any] = {
            "sampler": p.entry.name,
            "variant": p.variant,
            "model": p.on.model.name,
            "settings": asdict(p.settings),
            "seconds": [round(s, 6) for s in seconds],
            "median_seconds": round(median(seconds), 6),
            "seconds_per_image": round(median(seconds) / batch, 6),
            "ratio": round(median(ratios), 4),
            "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "counts": counts,
            "phases": phases,
            "peak_memory_bytes": reports[-1].peak_memory_bytes,
        }
        note = " ".join(dict.fromkeys(r.note for r in reports if r.note))
        if note:
            entry["note"] = note
        if accepted:
            entry["acceptance"] = round(median(accepted), 6)
        if operations and SPLIT not in note:  # an attempt that ran out of memory would be counted too
            with counted() as work:
                draw(p, condition, 0)
            entry |= {"operations": work.operations, "waits": work.waits}
            entry["floor"] = round(work.floor(speed), 6) if speed else None
        out.append(entry)
    return {"batch": batch, "runs": out}


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _about(name: str, device: torch.device, repeats: int) -> str:
    about = _machine(device)
    threads = f", {about['threads']} threads" if device.type == "cpu" else ""
    machine = f"{about['name']}{threads}, torch {about['torch']}"
    return f"{name} on {device.type} ({machine}); medians of {repeats}, interleaved"


def _teraflops(counts: Mapping[str, int], p: Planned, batch: int) -> str:
    """Floating-point operations of an image, as counted; "" for models whose reports do not count them."""
    if "transformer_flops" not in counts or p.entry.needs_draft:
        return ""
    model: Any = p.on.model if p.on else None
    head = model.hybrid.config.head_flops(counts.get("head_rows", 0))
    return f"{(counts['transformer_flops'] + head) / batch / 1e12:.3g}"


def _notes(found: list[dict[str, Any]], planned: list[Planned]) -> list[str]:
    """Remarks of the reports, each with batch and sampler."""
    return [
        f"note: {p.label}, batch {group['batch']}: {entry['note']}"
        for group in found
        for entry, p in zip(group["runs"], planned, strict=True)
        if "note" in entry
    ]


def _table(found: list[dict[str, Any]], planned: list[Planned]) -> str:
    rows = [list(_COLUMNS)]
    for group in found:
        for entry, p in zip(group["runs"], planned, strict=True):
            low, high = entry["ratio_range"]
            phases = {phase: f"{seconds:.3f}" for phase, seconds in entry["phases"].items()}
            rows.append(
                [
                    str(group["batch"]),
                    p.label,
                    f"{entry['median_seconds']:.3f}",
                    f"{entry['seconds_per_image']:.3f}",
                    f"{entry['ratio']:.2f}x",
                    f"{low:.2f}-{high:.2f}",
                    phases.get("transformer", ""),
                    phases.get("head", ""),
                    phases.get("sampling", ""),
                    str(entry["counts"].get("transformer_passes", "")),
                    str(entry["counts"].get("head_calls", "")),
                    f"{100 * entry['acceptance']:.1f} %" if "acceptance" in entry else "",
                    str(entry.get("operations", "")),
                    str(entry.get("waits", "")),
                    f"{entry['floor']:.3f}" if entry.get("floor") else "",
                    _teraflops(entry["counts"], p, group["batch"]),
                ]
            )
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows[1:])]  # without empty columns
    rows = [[row[i] for i in kept] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
