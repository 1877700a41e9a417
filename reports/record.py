"""Reports: counts, timings and token maps of one sampler run, and their text, table, CSV and JSON forms."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import numpy as np
import torch

from ..errors import OfFastAR, amount
from .quality import Quality, closeness
from .reading import NOT_READ, within
from .table import figure, literal, markdown, percent
from .timing import (
    APART,
    BASELINE,
    FIRST_RUN,
    MEANINGS,
    ONE_RUN,
    OTHER_DEVICE,
    OTHER_DTYPE,
    OTHER_EDIT,
    OTHER_MODEL,
    OTHER_PROCESS,
    OTHER_SIZE,
    OTHER_THREADS,
    Speedup,
    how_timed,
    shown_seconds,
    speedup_of,
    speedup_of_pairs,
)
from .work import OF_DRAFT, Work

T = TypeVar("T")

# Outcomes of a token: the values of the map "outcome". No sampler writes 3 or 4 any more.
PLAIN, ACCEPTED, REDONE, REJECTED, GIVEN, EXPANDED = 0, 1, 2, 5, 6, 7

# Counts in the order in which they are listed, each with the title of its column in tables, or "" if it has none. A
# column is left out if no run has the count.
COUNTS = {
    "transformer_passes": "passes",
    "transformer_tokens": "",
    "head_calls": "diffusion calls",
    "head_rows": "head rows",
    "decoder_passes": "",
    "accepted": "accepted",
    "rejected": "",
    "restarts": "restarts",
    "cached_tokens": "",
    "cached_calls": "",
    "cache_bytes": "",
    "drafted_steps": "",
    "accepted_steps": "",
    "draft_passes": "",
    "draft_head_calls": "",
    "redraws": "",
    "redraws_exhausted": "",
    "expanded": "",
    "islands": "",
    "waves": "",
    "encoder_rows": "",
    "decoder_rows": "",
    "llm_rows": "",
    "prompt_rows": "",
}
# Counts of models with prompts only.
PROMPT_COUNTS = tuple(COUNTS)[-4:]
VERSION = 1
# In the name of a model, what stands before its draft model.
DRAFTED_BY = ", drafted by "
# Name of this process: seconds of two processes are not compared.
PROCESS = uuid4().hex[:8]
# Characters of a note in the text form.
LONGEST_NOTE = 1600
# Share of the parameters that PAR's embeddings may be.
_ADDED = 0.05
# First characters of a spreadsheet's formula.
_FORMULA = ("=", "+", "-", "@")


# ------------------------------------------------------------------------------------------------ fields

# How the values of a field join, of a batch that was sampled in parts, one after another.
Join = Callable[[Sequence[Any]], Any]


def _first(parts: Sequence[Any]) -> Any:
    """The first part's value, which the others share."""
    return parts[0]


def _shared(parts: Sequence[str]) -> str:
    """The value of all parts; "" if they have different ones."""
    return parts[0] if len(set(parts)) == 1 else ""


def _added(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum under each name."""
    out: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0) + value
    return out


def _largest(parts: Sequence[int | None]) -> int | None:
    """Of memory, the part that takes most counts; None if it is unknown."""
    return max((part for part in parts if part is not None), default=None)


def _largest_of_each(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The same by stage."""
    stages = sorted({stage for part in parts for stage in part})
    return {stage: max(part.get(stage, 0) for part in parts) for stage in stages}


def _following(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """One after another, as the images."""
    return tuple(itertools.chain.from_iterable(parts))


def _arrays_following(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The same of arrays; None if there is none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


def _maps_following(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The same of arrays by name, which are those of the first part."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _by(join: Join, **about: Any) -> dict[str, Any]:
    """Metadata of a field of a report: how it joins, and ``about`` how it is read from JSON, see ``reading``."""
    return {"join": join, **about}


@dataclass
class Report(OfFastAR):
    """Record of one sampler run over a batch. Each field says how it joins, see :func:`joined`."""

    kind: ClassVar[str] = "report"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    sampler: str = field(metadata=_by(_first))  # its command-line name, for example "fasthybrid"
    model: str = field(metadata=_by(_first))  # display name
    settings: dict[str, Any] = field(metadata=_by(_first))
    seed: int | None = field(metadata=_by(_first))  # None when noise was injected
    images: int = field(metadata=_by(sum, **within(1)))  # batch size
    device: str = field(metadata=_by(_first))  # torch device type
    # Wall time of the sampler, without the decoder; the median if it ran several times.
    seconds: float = field(default=0.0, metadata=_by(sum))
    # Seconds of "transformer", "head", "draft" (CSpD), "sampling" (discrete tokens) and "decoder".
    phases: dict[str, float] = field(default_factory=dict, metadata=_by(_added))
    # Name from COUNTS to a sum over the batch; counts that do not apply are absent. docs/report.md explains each.
    counts: dict[str, int] = field(default_factory=dict, metadata=_by(_added))
    threads: int | None = field(default=None, metadata=_by(_first))  # of PyTorch on a CPU
    # Allocated device memory; None if the device does not report it.
    peak_memory_bytes: int | None = field(default=None, metadata=_by(_largest, **NOT_READ))
    # Estimated bytes by stage, computed before the run, see runs/memory/__init__.py; {} where nothing is estimated.
    memory: dict[str, int] = field(default_factory=dict, metadata=_by(_largest_of_each, **NOT_READ))
    # Arrays [B, h, w]: "step" int32 (AR step or pass at which a token was fixed, -1 for given tokens), "outcome" uint8
    # (see above), "cached" int32 (number of AR steps at which the token's decoder rows came from a cache), "islands"
    # int32 (number from 1 within the image, 0 elsewhere), "waves" int32 (from 0, -1 elsewhere).
    maps: dict[str, np.ndarray] = field(default_factory=dict, metadata=_by(_maps_following, **NOT_READ))
    # Of all verified drafts, float32 [n].
    similarity: np.ndarray | None = field(default=None, metadata=_by(_arrays_following, **NOT_READ))
    note: str = field(default="", metadata=_by(_first))  # a remark about the settings
    # Id of ComfyUI's run in which it was timed.
    prompt: str = field(default="", compare=False, metadata=_by(_first, **NOT_READ))
    # Seconds of every repeat, in turn with the baseline's; () of a single run.
    timings: tuple[float, ...] = field(default=(), metadata=_by(_first))
    # Whether the network had not run before, so that the seconds include warm-up.
    first_run: bool = field(default=False, metadata=_by(any))
    process: str = field(default="", compare=False, metadata=_by(_first))  # in which it was timed
    dtype: str = field(default="", metadata=_by(_first))  # of most weights: "fp32", "bf16", "fp16", "int8", "fp8"
    # Tokens of an image, rows and columns; () where it is unknown.
    grid: tuple[int, ...] = field(default=(), metadata=_by(_first))
    # Of the network; 0 where it is unknown, as in a saved report.
    parameters: int = field(default=0, compare=False, metadata=_by(_first, **NOT_READ))
    # What was drawn and what was edited: a digest an image; () where it is unknown, and without an edit.
    conditions: tuple[str, ...] = field(default=(), metadata=_by(_following))
    edits: tuple[str, ...] = field(default=(), metadata=_by(_following))
    # What all images show, such as "cat"; "" where unknown.
    subject: str = field(default="", compare=False, metadata=_by(_shared, **NOT_READ))

    def __str__(self) -> str:
        """The text that ComfyUI's Preview as Text shows."""
        return to_text(self)

    def add(self, **counts: int) -> None:
        """Add to counts; a new name starts at 0."""
        for name, n in counts.items():
            self.counts[name] = self.counts.get(name, 0) + int(n)

    def remark(self, *texts: str) -> None:
        """Add remarks to the note; empty ones are left out."""
        remarks = [text for text in (self.note, *texts) if text]
        self.note = "; ".join(remarks)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts as a fraction of verified drafts, 0..1; None if no draft was verified."""
        return Work(counts=self.counts).acceptance

    @property
    def judged(self) -> str:
        """What ``acceptance`` is the share of: guesses of *parallel*, which do not change the image, or drafts."""
        return "guesses confirmed" if self.settings.get("parallel") else "drafts accepted"

    def own(self, count: str) -> int | None:
        """A count of work without the draft model's part of it; None if the sampler does not have it."""
        total = self.counts.get(count)
        return None if total is None else total - self.of_draft(count)

    def of_draft(self, count: str) -> int:
        """The draft model's part of a count of work; 0 without a draft model."""
        return self.counts.get(OF_DRAFT.get(count, ""), 0)

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens per image that one sequential transformer pass fixes, or None without a "step" map."""
        passes = self.counts.get("transformer_passes", 0)
        step = self.maps.get("step")
        if not passes or step is None or not len(step):
            return None

        fixed = float((step >= 0).sum())
        return fixed / len(step) / passes

    @property
    def target(self) -> str:
        """The model without its draft model."""
        return self.model.partition(DRAFTED_BY)[0]

    @property
    def repeats(self) -> int:
        """How many times it was timed."""
        return max(1, len(self.timings))

    @property
    def timed(self) -> str:
        """The seconds and how they were measured: "0.861 (one run)", "0.861 (median of 5)"."""
        return f"{shown_seconds(self.seconds)} ({how_timed(self.repeats, self.first_run)})"

    def speedup(self, baseline: Report | None) -> Speedup | None:
        """Seconds per image of ``baseline`` over seconds per image of this run, or None if either has no time.

        If both ran several times in turn, each repeat is a pair.
        """
        if baseline is None or not (self.seconds and baseline.seconds):
            return None
        if baseline is self:
            return Speedup(1.0, 1.0, 1.0, note=BASELINE)

        for difference, holds in _DIFFERENCES:
            if holds(self, baseline):
                return Speedup(note=difference)

        scale = self.images / baseline.images
        if self.repeats == baseline.repeats > 1 and all(self.timings) and all(baseline.timings):
            pairs = zip(baseline.timings, self.timings, strict=True)
            return speedup_of_pairs([(scale * other, own) for other, own in pairs])

        together = self.prompt == baseline.prompt and self.repeats == baseline.repeats
        note = ONE_RUN if together else APART
        return speedup_of([scale * baseline.seconds / self.seconds], note=note)

    def to_dict(self, baseline: Report | None = None, quality: Quality | None = None) -> dict[str, Any]:
        """The stable JSON form of one run (docs/report.md)."""
        speedup = self.speedup(baseline)
        out = {
            "sampler": self.sampler,
            "model": self.model,
            "settings": self.settings,
            "seed": self.seed,
            "images": self.images,
            "grid": list(self.grid) or None,
            "seconds": round(self.seconds, 6),
            "repeats": self.repeats,
            "timings": [round(seconds, 6) for seconds in self.timings] or None,
            "first_run": self.first_run or None,
            **(speedup.to_dict() if speedup else {}),
            "counts": {name: self.counts[name] for name in COUNTS if name in self.counts},
            "acceptance": _rounded(self.acceptance, 6),
            "tokens_per_pass": _rounded(self.tokens_per_pass, 4),
            "phases": {name: round(seconds, 6) for name, seconds in self.phases.items()},
            "threads": self.threads,
            "dtype": self.dtype or None,
            "process": self.process or None,
            "conditions": list(self.conditions) or None,
            "edits": list(self.edits) or None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_estimate_bytes": dict(self.memory) or None,
            "quality": quality.to_dict() if quality else None,
            "note": self.note or None,
        }

        always = ("seed", "peak_memory_bytes")
        return {name: value for name, value in out.items() if value is not None or name in always}


def fingerprint(*parts: Any) -> str:
    """Eight hexadecimal digits by content, of tensors and of what has a text."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            found.update(f"{part.dtype} {list(part.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            found.update(str(part).encode(errors="replace"))
        found.update(b"\0")

    return found.hexdigest()[:8]


_DTYPE_NAMES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def dtype_of(net: torch.nn.Module) -> str:
    """Name of the dtype of most of a network's weights: "fp32", "bf16", "fp16", "int8", "fp8", "int4"."""
    return dtype_of_weights(net.parameters())


def dtype_of_weights(weights: Iterable[torch.Tensor]) -> str:
    """Name of the dtype in which most of these weights are stored, "int4" where some of them have 4 bits; "" if there
    are none.
    """
    numbers: dict[torch.dtype, int] = {}
    for weight in weights:
        dtype = getattr(weight, "storage_dtype", weight.dtype)  # of a quantised weight
        numbers[dtype] = numbers.get(dtype, 0) + weight.numel()
    if not numbers:
        return ""

    if torch.uint8 in numbers:
        return "int4"
    most = max(numbers, key=lambda dtype: numbers[dtype])
    name = str(most).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


# In what two runs differ so that the ratio of their seconds says nothing about the method, the first that holds.
_DIFFERENCES: tuple[tuple[str, Callable[[Report, Report], bool]], ...] = (
    (OTHER_MODEL, lambda run, baseline: run.target != baseline.target and not _own_model(run, baseline)),
    (OTHER_SIZE, lambda run, baseline: run.grid != baseline.grid),
    (OTHER_EDIT, lambda run, baseline: run.edits != baseline.edits),
    (OTHER_DEVICE, lambda run, baseline: run.device != baseline.device),
    (OTHER_DTYPE, lambda run, baseline: run.dtype != baseline.dtype),
    (OTHER_THREADS, lambda run, baseline: run.threads != baseline.threads),
    (OTHER_PROCESS, lambda run, baseline: run.process != baseline.process),
    (FIRST_RUN, lambda run, baseline: run.first_run or baseline.first_run),
)


def _own_model(run: Report, baseline: Report) -> bool:
    """Whether one of two models is PAR's, which has to be trained for it, and the networks are of one size.

    PAR adds a few embeddings.
    """
    larger = max(run.parameters, baseline.parameters)
    same_size = abs(run.parameters - baseline.parameters) <= _ADDED * larger
    return "par" in (run.sampler, baseline.sampler) and same_size


def _rounded(value: float | None, digits: int) -> float | None:
    """A number with this many decimals; None for None."""
    return None if value is None else round(value, digits)


# A field that does not say how it joins ends the import.
_JOINS: dict[str, Join] = {one.name: one.metadata["join"] for one in fields(Report)}


def joined(reports: Sequence[Report], note: str = "") -> Report:
    """The report of a batch that was sampled in parts, one after another; ``note`` is added to the remarks."""
    values = {name: join([getattr(report, name) for report in reports]) for name, join in _JOINS.items()}
    out = Report(**values)
    out.note = " ".join(filter(None, (out.note, note)))
    return out


def repeated(reports: Sequence[Report]) -> Report:
    """The report of a run that was repeated, in turn with others: medians of seconds, phases and counts.

    The images are those of the first run.
    """
    first = reports[0]
    if len(reports) == 1:
        return first

    phases: dict[str, float] = {}
    for name in first.phases:
        phases[name] = median(report.phases[name] for report in reports if name in report.phases)

    counts: dict[str, int] = {}
    for name in first.counts:
        counts[name] = round(median(report.counts[name] for report in reports if name in report.counts))

    peaks = [report.peak_memory_bytes for report in reports if report.peak_memory_bytes is not None]
    timings = tuple(report.seconds for report in reports)
    return replace(
        first,
        seconds=median(timings),
        timings=timings,
        first_run=False,
        phases=phases,
        counts=counts,
        peak_memory_bytes=max(peaks, default=None),
    )


# The phase of a clock in which the caller of a sampler, and not the run, takes the time.
PAUSE = "pause"


class Clock:
    """Measures the seconds of a run and of its phases.

    On a CUDA device it records events on the stream and compares them after the run, so that no step waits for the
    device. Elsewhere it measures wall time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases: list[tuple[str, Any, Any]] = []  # name, beginning and end

        # The present moment: seconds, or an event on the stream of a CUDA device.
        self._now: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
            self._now = self._event

        self._start = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as part of ``name``.

        :data:`PAUSE` is left out of the run's seconds: a ``yield``, during which the caller may draw a preview. Work
        that was queued on a CUDA device before a pause is not counted as part of it.
        """
        began = self._now()
        yield
        self._phases.append((name, began, self._now()))

    def timed(self, name: str, parts: Iterator[T]) -> Iterator[T]:
        """The same parts, the making of each timed as part of ``name``."""
        while True:
            with self.phase(name):
                part = next(parts, None)
            if part is None:
                return

            yield part

    def stop(self, report: Report) -> None:
        """Write seconds, phases and peak memory into the report."""
        end = self._now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            report.peak_memory_bytes = torch.cuda.max_memory_allocated(self._device)

        elif self._device.type == "cpu":
            report.threads = torch.get_num_threads()

        report.process = PROCESS
        report.phases = {}
        for name, began, ended in self._phases:
            report.phases[name] = report.phases.get(name, 0.0) + self._between(began, ended)
        report.seconds = self._between(self._start, end) - report.phases.pop(PAUSE, 0.0)

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


def counted(report: Report, count: str, form: str = ",", units: str = "") -> str:
    """A count of work with the draft model's part apart: "32 passes", "12 passes (draft 27)"; "" if there is none.

    A draft model is smaller than its target, so that the sum of both would say nothing.
    """
    number = report.own(count)
    if not number:
        return ""

    own = amount(number, units) if units else figure(number, form)
    drafted = figure(report.of_draft(count) or None, form)
    return f"{own} (draft {drafted})" if drafted else own


# Names of figures, as grids and tables show them, to what they mean.
EXPLAINED = {
    "passes": "the number of runs of the large network, one after another",
    "diffusion calls": "the number of runs of the small network (the diffusion head), one after another",
    "draft": "passes and calls of the draft model",
    "head rows": "tokens that the diffusion calls computed",
    "acceptance": "the share of the verified drafts that were accepted",
    "speed-up": "the baseline's seconds per image divided by this run's seconds per image",
}


def explain(reports: Sequence[Report | None], baseline: Baseline = 0) -> str:
    """One line that explains the figures that these reports show; "" without reports."""
    known = [report for report in reports if report is not None]
    speedups: list[Speedup] = []
    for report, base in zip(reports, against(reports, baseline), strict=True):
        found = None if report is None else report.speedup(base)
        if found is not None and found.note != BASELINE:
            speedups.append(found)

    shown = []
    if any("transformer_passes" in report.counts for report in known):
        shown.append("passes")
    if any("head_calls" in report.counts for report in known):
        shown.append("diffusion calls")
    if any(report.of_draft("transformer_passes") for report in known):
        shown.append("draft")
    if any("head_rows" in report.counts for report in known):
        shown.append("head rows")
    if any(report.acceptance is not None for report in known):
        shown.append("acceptance")
    if speedups:
        shown.append("speed-up")

    parts = [f"{name}: {EXPLAINED[name]}" for name in shown]
    notes = {found.note for found in speedups}
    parts += [f"{note}: {meaning}" for note, meaning in MEANINGS.items() if note in notes]

    return "; ".join(parts)


# Index of the baseline of all reports, or one index per report; None for no baseline.
Baseline = int | Sequence[int | None]


def compared(bases: Sequence[int | None]) -> list[int | None]:
    """The index of each run's baseline, and None for a run that only itself refers to: nothing is compared with it."""
    referred_to = {base for i, base in enumerate(bases) if base != i}
    return [None if base == i and i not in referred_to else base for i, base in enumerate(bases)]


def against(reports: Sequence[Report | None], baseline: Baseline) -> list[Report | None]:
    """The baseline of each report, or None; see :func:`compared`."""
    indices = [baseline] * len(reports) if isinstance(baseline, int) else baseline
    return [None if i is None else reports[i] for i in compared(indices)]


# Quality of every run against its baseline's images, None where there is none; or () for no such columns.
Qualities = Sequence[Quality | None]

# Columns of a CSV file before and after those of a method's own counts.
_CSV_COLUMNS = (
    "sampler",
    "transformer_passes",
    "head_calls",
    "head_rows",
    "draft_passes",
    "draft_head_calls",
    "acceptance",
    "restarts",
)
_CSV_RESULTS = ("seconds", "repeats", "first_run")


def _in_table(report: Report, count: str) -> str:
    """A count in its column: work with the draft model's part, and of accepted drafts their share."""
    if count == "accepted":
        return percent(report.acceptance, 1)
    if count in OF_DRAFT:
        return counted(report, count, "d")
    return figure(report.counts.get(count), "d")


def to_table(
    reports: Sequence[Report], labels: Sequence[str] | None = None, baseline: Baseline = 0, quality: Qualities = ()
) -> str:
    """A Markdown table with one row per run; empty columns are omitted."""
    names = labels or [report.sampler for report in reports]
    bases = against(reports, baseline)
    qualities = quality or [None] * len(reports)
    columns = {count: title for count, title in COUNTS.items() if title}

    # The work first, which does not depend on the machine.
    rows = [["sampler", *columns.values(), "PSNR", "SSIM", "seconds", "speed-up"]]
    for name, report, base, found in zip(names, reports, bases, qualities, strict=True):
        speedup = report.speedup(base)
        row = [
            name,
            *(_in_table(report, count) for count in columns),
            *closeness(found),
            report.timed if report.seconds else "",
            speedup.text if speedup else "",
        ]
        rows.append(row)

    return markdown(rows, empty=False)


def to_csv(report: Report) -> str:
    """One run as CSV, a header and a line of numbers without units: the acceptance is a fraction from 0 to 1.

    ``repeats`` says from how many runs the seconds are. A method's own count with a column in tables is a column here
    if the run has it. An unknown figure is an empty cell. A name that a spreadsheet would compute as a formula begins
    with a quote.
    """
    own = [count for count, title in COUNTS.items() if title and count not in ("accepted", *_CSV_COLUMNS)]
    columns = (*_CSV_COLUMNS, *(count for count in own if count in report.counts), *_CSV_RESULTS)

    figures = report.to_dict()
    figures |= figures["counts"]
    figures["first_run"] = int(report.first_run)
    if report.sampler.startswith(_FORMULA):
        figures["sampler"] = f"'{report.sampler}"

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerow([figures.get(column, "") for column in columns])
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
    images = amount(report.images, "images")
    lines = [
        f"{literal(report.sampler)} on {literal(report.model)}, {images}, seed {report.seed}",
        f"seconds: {report.timed} on {_where(report)}",
    ]

    for name, seconds in report.phases.items():
        apart = ", not part of the seconds" if name == "decoder" else ""
        lines.append(f"  {literal(name)}: {seconds:.3f} s{apart}")

    for name in COUNTS:
        if name in report.counts:
            lines.append(f"{name.replace('_', ' ')}: {report.counts[name]}")

    more = {
        "tokens per pass": figure(report.tokens_per_pass, ".2f"),
        "acceptance": percent(report.acceptance, 1),
        "peak memory": figure(report.peak_memory_bytes, ".0f", " MiB", 2**-20),
        "memory, estimated": ", ".join(
            f"{_stage(name)} {size / 2**20:.0f} MiB" for name, size in report.memory.items()
        ),
        "note": literal(report.note, LONGEST_NOTE),
    }
    for name, text in more.items():
        if text:
            lines.append(f"{name}: {text}")

    settings = [f"{literal(name)}={literal(str(value))}" for name, value in report.settings.items()]
    lines.append(f"settings: {', '.join(settings)}")

    return "\n".join(lines)


def _stage(name: str) -> str:
    """A stage of the memory estimate in words: "weights: head (streamed)" is "head weights (streamed)"."""
    kind, colon, part = name.partition(": ")
    if not colon:
        return name

    part, bracket, rest = part.partition(" (")
    return f"{part} {kind}{bracket}{rest}"


def _where(report: Report) -> str:
    """Device, threads and dtype of a run as text."""
    parts = [literal(report.device)]
    if report.threads is not None:
        parts.append(amount(report.threads, "threads"))
    if report.dtype:
        parts.append(literal(report.dtype))

    return ", ".join(parts)
