"""Reports: counts, timings and token maps of one sampler run, and their text, table, CSV and JSON forms."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .quality import Quality, closeness
from .table import figure, literal, markdown

# Outcomes of a token: the values of the map "outcome".
PLAIN, ACCEPTED, REDONE, DRAFTED, CACHED, REJECTED, GIVEN, EXPANDED = range(8)

# Counts in the order in which they are listed.
COUNTS = (
    "transformer_passes",
    "transformer_tokens",
    "head_calls",
    "head_rows",
    "decoder_passes",
    "accepted",
    "rejected",
    "restarts",
    "cached_tokens",
    "cache_bytes",
    "drafted_steps",
    "accepted_steps",
    "draft_passes",
    "draft_head_calls",
    "expanded",
    "islands",
    "waves",
    "encoder_rows",
    "decoder_rows",
    "llm_rows",
    "prompt_rows",
)
# Counts of models with prompts only.
PROMPT_COUNTS = COUNTS[-4:]
VERSION = 1
# Characters of a note in the text form.
LONGEST_NOTE = 1600
# First characters of a spreadsheet's formula.
_FORMULA = ("=", "+", "-", "@")


@dataclass
class Report:
    """Record of one sampler run over a batch."""

    sampler: str  # its command-line name, for example "fasthybrid"
    model: str  # display name
    settings: dict[str, Any]
    seed: int | None  # None when noise was injected
    images: int  # batch size
    device: str  # torch device type
    seconds: float = 0.0  # wall time of the sampler, without the decoder
    # Seconds of "transformer", "head", "draft" (CSpD), "sampling" (discrete tokens) and "decoder".
    phases: dict[str, float] = field(default_factory=dict)
    # Name from COUNTS to a sum over the batch; counts that do not apply are absent. docs/report.md explains each.
    counts: dict[str, int] = field(default_factory=dict)
    threads: int | None = None  # of PyTorch on a CPU
    peak_memory_bytes: int | None = None  # allocated device memory; None if the device does not report it
    # Estimated bytes by stage, computed before the run, see samplers/mar/memory.py; {} where nothing is estimated.
    memory: dict[str, int] = field(default_factory=dict)
    # Arrays [B, h, w]: "step" int32 (AR step or pass at which a token was fixed, -1 for given tokens), "outcome" uint8
    # (see above), "cached" int32 (number of AR steps at which the token's decoder rows came from a cache), "islands"
    # int32 (number from 1 within the image, 0 elsewhere), "waves" int32 (from 0, -1 elsewhere).
    maps: dict[str, np.ndarray] = field(default_factory=dict)
    similarity: np.ndarray | None = None  # of all verified drafts, float32 [n]
    note: str = ""  # a remark about the settings
    prompt: str = field(default="", compare=False)  # id of ComfyUI's run in which it was timed

    def __str__(self) -> str:
        """For people: what core's Preview as Text shows."""
        return to_text(self)

    def add(self, **counts: int) -> None:
        """Add to counts; a new name starts at 0."""
        for name, n in counts.items():
            self.counts[name] = self.counts.get(name, 0) + int(n)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts as a fraction of verified drafts, 0..1; None if no draft was verified."""
        accepted = self.counts.get("accepted", 0)
        verified = accepted + self.counts.get("rejected", 0)
        return accepted / verified if verified else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens per image that one sequential transformer pass fixes, or None without a "step" map."""
        passes = self.counts.get("transformer_passes", 0)
        step = self.maps.get("step")
        if not passes or step is None or not len(step):
            return None

        fixed = float((step >= 0).sum())
        return fixed / len(step) / passes

    def speedup(self, baseline: Report | None) -> float | None:
        """Seconds per image of ``baseline`` over seconds per image of this run, or None if either has no time."""
        if baseline is None or not (self.seconds and baseline.seconds):
            return None

        return (baseline.seconds / baseline.images) / (self.seconds / self.images)

    def to_dict(self, baseline: Report | None = None, quality: Quality | None = None) -> dict[str, Any]:
        """The stable JSON form of one run (docs/report.md)."""
        out = {
            "sampler": self.sampler,
            "model": self.model,
            "settings": self.settings,
            "seed": self.seed,
            "images": self.images,
            "seconds": round(self.seconds, 6),
            "speedup": _rounded(self.speedup(baseline), 4),
            "counts": {name: self.counts[name] for name in COUNTS if name in self.counts},
            "acceptance": _rounded(self.acceptance, 6),
            "tokens_per_pass": _rounded(self.tokens_per_pass, 4),
            "phases": {name: round(seconds, 6) for name, seconds in self.phases.items()},
            "threads": self.threads,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_estimate_bytes": dict(self.memory) or None,
            "quality": quality.to_dict() if quality else None,
            "note": self.note or None,
        }

        always = ("seed", "peak_memory_bytes")
        return {name: value for name, value in out.items() if value is not None or name in always}


def _rounded(value: float | None, digits: int) -> float | None:
    """A number with so many decimals; None for None."""
    return None if value is None else round(value, digits)


def joined(reports: Sequence[Report], note: str = "") -> Report:
    """The report of a batch that was sampled in parts, one after another; ``note`` is added to the remarks."""
    first = reports[0]
    images = sum(report.images for report in reports)
    out = Report(first.sampler, first.model, first.settings, first.seed, images, first.device)
    out.threads = first.threads
    out.note = " ".join(filter(None, (first.note, note)))

    # Times and counts add up.
    for report in reports:
        out.seconds += report.seconds
        out.add(**report.counts)
        for name, seconds in report.phases.items():
            out.phases[name] = out.phases.get(name, 0.0) + seconds

    # Of memory, the part that takes most counts.
    peaks = [report.peak_memory_bytes for report in reports if report.peak_memory_bytes is not None]
    out.peak_memory_bytes = max(peaks, default=None)

    stages: set[str] = set()
    for report in reports:
        stages.update(report.memory)
    for stage in sorted(stages):
        out.memory[stage] = max(report.memory.get(stage, 0) for report in reports)

    # The images of the parts follow one another.
    for name in first.maps:
        out.maps[name] = np.concatenate([report.maps[name] for report in reports])

    similarities = [report.similarity for report in reports if report.similarity is not None]
    if similarities:
        out.similarity = np.concatenate(similarities)

    return out


class Clock:
    """Measures the seconds of a run and of its phases.

    On a CUDA device it records events on the stream and compares them after the run, so that no step waits for the
    device. Elsewhere it measures wall time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases: list[tuple[str, Any, Any]] = []  # name, beginning and end
        self._pauses: list[tuple[Any, Any]] = []

        # The present moment: seconds, or an event on the stream of a CUDA device.
        self._now: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
            self._now = self._event

        self._start = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as part of ``name``."""
        began = self._now()
        yield
        self._phases.append((name, began, self._now()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave a block out of the run's seconds: a ``yield``, during which the caller may draw a preview.

        Work that was queued on a CUDA device before the block is not counted as a pause.
        """
        began = self._now()
        yield
        self._pauses.append((began, self._now()))

    def stop(self, report: Report) -> None:
        """Write seconds, phases and peak memory into the report."""
        end = self._now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            report.peak_memory_bytes = torch.cuda.max_memory_allocated(self._device)

        elif self._device.type == "cpu":
            report.threads = torch.get_num_threads()

        report.seconds = self._between(self._start, end)
        for began, ended in self._pauses:
            report.seconds -= self._between(began, ended)

        report.phases = {}
        for name, began, ended in self._phases:
            report.phases[name] = report.phases.get(name, 0.0) + self._between(began, ended)

    def _event(self) -> Any:
        """An event at the end of what was queued on the CUDA device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, began: Any, ended: Any) -> float:
        """Seconds between two moments. Events of a CUDA device count milliseconds."""
        if self._device.type != "cuda":
            return ended - began
        return began.elapsed_time(ended) / 1000


# ------------------------------------------------------------------------------------------------ text forms


# Names of figures, as grids and tables show them, to what they mean.
EXPLAINED = {
    "speed-up": "the baseline's seconds an image, divided by this run's",
    "passes": "sequential evaluations of the large network",
    "head calls": "sequential evaluations of the small diffusion network",
    "acceptance": "drafts that were kept",
}


def explain(reports: Sequence[Report | None]) -> str:
    """One line that explains the figures that these reports show; "" without reports."""
    known = [report for report in reports if report is not None]

    shown = []
    if len(known) > 1:
        shown.append("speed-up")
    if any("transformer_passes" in report.counts for report in known):
        shown.append("passes")
    if any("head_calls" in report.counts for report in known):
        shown.append("head calls")
    if any(report.acceptance is not None for report in known):
        shown.append("acceptance")

    return "; ".join(f"{name}: {EXPLAINED[name]}" for name in shown)


# Index of the baseline of all reports, or one index per report; None for no baseline.
Baseline = int | Sequence[int | None]


def against(reports: Sequence[Report | None], baseline: Baseline) -> list[Report | None]:
    """The baseline of each report, or None."""
    indices = [baseline] * len(reports) if isinstance(baseline, int) else baseline
    return [None if i is None else reports[i] for i in indices]


# Quality of every run against its baseline's images, None where there is none; or () for no such columns.
Qualities = Sequence[Quality | None]

# Columns of a table, by their names in CSV.
_COLUMNS = {
    "sampler": "sampler",
    "speedup": "speed-up",
    "seconds": "seconds",
    "transformer_passes": "passes",
    "head_calls": "head calls",
    "head_rows": "head rows",
    "acceptance": "accepted",
    "restarts": "restarts",
    "psnr": "PSNR",
    "ssim": "SSIM",
}


def _rows(
    reports: Sequence[Report], labels: Sequence[str] | None, baseline: Baseline, quality: Qualities = ()
) -> list[list[str]]:
    """The cells of :data:`_COLUMNS` of every run."""
    names = labels or [report.sampler for report in reports]
    bases = against(reports, baseline)
    qualities = quality or [None] * len(reports)

    rows = []
    for name, report, base, found in zip(names, reports, bases, qualities, strict=True):
        row = [
            name,
            figure(report.speedup(base), ".2f", "x"),
            figure(report.seconds, ".2f"),
            figure(report.counts.get("transformer_passes"), "d"),
            figure(report.counts.get("head_calls"), "d"),
            figure(report.counts.get("head_rows"), "d"),
            figure(report.acceptance, ".1f", " %", 100),
            figure(report.counts.get("restarts"), "d"),
            *closeness(found),
        ]
        rows.append(row)

    return rows


def to_table(
    reports: Sequence[Report], labels: Sequence[str] | None = None, baseline: Baseline = 0, quality: Qualities = ()
) -> str:
    """A Markdown table with one row per run; empty columns are omitted."""
    head = list(_COLUMNS.values())
    return markdown([head, *_rows(reports, labels, baseline, quality)], empty=False)


def to_csv(
    reports: Sequence[Report], labels: Sequence[str] | None = None, baseline: Baseline = 0, quality: Qualities = ()
) -> str:
    """The columns of :func:`to_table` as CSV, as numbers without units: the acceptance is a fraction from 0 to 1.

    An unknown figure is an empty cell. A name that a spreadsheet would compute as a formula begins with a quote.
    """
    names = labels or [report.sampler for report in reports]
    bases = against(reports, baseline)
    qualities = quality or [None] * len(reports)

    rows: list[list[Any]] = []
    for name, report, base, found in zip(names, reports, bases, qualities, strict=True):
        figures = report.to_dict(base, found)
        figures.update(figures["counts"])
        figures.update(figures.get("quality") or {})
        figures["sampler"] = f"'{name}" if name.startswith(_FORMULA) else name

        rows.append([figures.get(column, "") for column in _COLUMNS])

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(rows)
    return out.getvalue()


def to_json(reports: Sequence[Report], baseline: Baseline = 0, quality: Qualities = ()) -> str:
    """The JSON of docs/report.md: {"version", "device", "runs": [...]}."""
    bases = against(reports, baseline)
    qualities = quality or [None] * len(reports)
    runs = [report.to_dict(base, found) for report, base, found in zip(reports, bases, qualities, strict=True)]

    device = reports[0].device if reports else ""
    return json.dumps({"version": VERSION, "device": device, "runs": runs}, indent=2)


def to_text(report: Report) -> str:
    """One run as text: seconds, phases, counts and settings, one per line.

    Names are shown as they are, see :func:`.table.literal`.
    """
    images = "1 image" if report.images == 1 else f"{report.images} images"
    lines = [
        f"{literal(report.sampler)} on {literal(report.model)}, {images}, seed {report.seed}",
        f"seconds: {report.seconds:.3f} on {literal(report.device)}",
    ]

    for name, seconds in report.phases.items():
        lines.append(f"  {literal(name)}: {seconds:.3f} s")

    for name in COUNTS:
        if name in report.counts:
            lines.append(f"{name.replace('_', ' ')}: {report.counts[name]}")

    more = {
        "tokens per pass": figure(report.tokens_per_pass, ".2f"),
        "acceptance": figure(report.acceptance, ".1f", " %", 100),
        "peak memory": figure(report.peak_memory_bytes, ".0f", " MiB", 2**-20),
        "memory, estimated": ", ".join(f"{stage} {size / 2**20:.0f} MiB" for stage, size in report.memory.items()),
        "note": literal(report.note, LONGEST_NOTE),
    }
    for name, text in more.items():
        if text:
            lines.append(f"{name}: {text}")

    settings = [f"{literal(name)}={literal(str(value))}" for name, value in report.settings.items()]
    lines.append(f"settings: {', '.join(settings)}")

    return "\n".join(lines)
