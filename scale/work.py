"""Drawing shards: models that stay loaded, conditions by image index, and one function that draws a shard and writes it."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ..assembly import (
    AUTO,
    Drafts,
    Ready,
    Source,
    decode,
    defaults,
    language_model_for,
    load,
    load_language_model,
    load_reader,
    prompt_settings,
)
from ..errors import UserError
from ..model_loaders.networks.ta_tok import TATokModel
from ..reports.record import Report
from ..samplers.batches import in_parts
from ..samplers.choice import Choice
from ..samplers.conditioning import AnyCondition, Condition, PromptCondition, TextCondition, label_sets, resolve_labels
from ..samplers.registry import FAMILIES, HYBRID, MAR, TAR, Entry, find
from ..samplers.settings import make
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.tar import tar_prompt
from ..selection import begin, complete, warm_up
from .folder import host
from .spec import Spec
from .store import Cell, Shard, Store, shard_key

# Called with (steps done, steps in all) of the running shard.
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Job:
    """A shard to draw.

    Attributes:
        cell: id of its cell.
        first, count: its images.
        at_most: images to sample at once, 0 for all; below ``count`` after memory was insufficient.
    """

    cell: str
    first: int
    count: int
    at_most: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sampler on its model.

    Attributes:
        entry: with draft model and up-sampler bound.
        ready: the model.
        settings: all settings.
        digest: of all files that the pictures depend on.
        size: height and width of a picture.
    """

    entry: Entry
    ready: Ready
    settings: Any
    digest: str
    size: tuple[int, int]


def numerics(spec: Spec, source: Source) -> dict[str, Any]:
    """What decides the last bits of a picture beside the model: device type, dtype, product method, threads."""
    device = (source.compute or source.device).type
    threads = (spec.threads or torch.get_num_threads()) if device == "cpu" else 0
    return {"device": device, "dtype": source.dtype, "threads": threads}


def machine(device: torch.device) -> dict[str, Any]:
    """What a run records about its machine."""
    cuda = device.type == "cuda"
    return {
        "host": host(),
        "system": platform.platform(),
        "processor": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


# ------------------------------------------------------------------------------------------------ models

_digests: dict[tuple[str, int, int], str] = {}


def file_digest(path: Path) -> str:
    """sha256 of a file, or of the files of a folder with their names. A file is read again only if its size or time changes."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        text = "".join(f"{p.relative_to(path).as_posix()}:{file_digest(p)};" for p in inside)
        return hashlib.sha256(text.encode()).hexdigest()
    about = path.stat()
    key = (str(path), about.st_size, about.st_mtime_ns)
    if key not in _digests:
        state = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 22):
                state.update(part)
        _digests[key] = state.hexdigest()
    return _digests[key]


class Models:
    """Models of a process. The last one stays loaded with its draft models; samplers on it are prepared once.

    Args:
        spec: which decoder, draft model and up-sampler.
        source: how files are found; the files that it returns enter the digests.
    """

    def __init__(self, spec: Spec, source: Source):
        self.spec = spec
        self.used: list[Path] = []  # files found since it was last cleared
        self._find = source.find
        self.source = replace(source, find=self._recorded)
        self._name: tuple[str, str] | None = None
        self._ready: tuple[Ready, tuple[Path, ...]] | None = None
        self._entries: dict[tuple[str, str], tuple[Entry, tuple[Path, ...]]] = {}

    def _recorded(self, choice: str, family: str) -> Path:
        path = self._find(choice, family)
        self.used.append(path)
        return path

    def ready(self, family: str, choice: str) -> tuple[Ready, tuple[Path, ...]]:
        """A model with the files of model and decoder; the model before it is freed."""
        if self._ready is None or self._name != (family, choice):
            self._ready, self._name = None, None
            self._entries.clear()
            self.used.clear()
            grid = None if family == MAR else self.spec.grid
            loaded = load(family, choice, self.source, self.spec.decoder, grid)
            self._ready, self._name = (loaded, tuple(self.used)), (family, choice)
        return self._ready

    def prepare(self, choice: Choice, family: str, model: str) -> Prepared:
        """A sampler on a model.

        Raises:
            UserError: a file is missing or does not fit, or the settings do not suit the model.
        """
        ready, files = self.ready(family, model)
        width = ready.model.net.config.dim
        return self._with(choice.entry, choice.settings(defaults(ready), ready.demo, width), ready, files)

    def restore(self, cell: Cell) -> Prepared:
        """The sampler of a cell.

        Raises:
            UserError: a file is missing, or is another one than when the cell was planned.
        """
        entry = find(cell.sampler)
        ready, files = self.ready(cell.family, cell.model)
        found = self._with(entry, make(entry.settings, cell.settings), ready, files)
        if found.digest != cell.model_digest:
            raise UserError(
                f"model: the files of {cell.model} on {host()} are not those that the sweep began with; use the same ones, or name another "
                "--out."
            )
        return found

    def _with(self, entry: Entry, settings: Any, ready: Ready, files: tuple[Path, ...]) -> Prepared:
        name = entry.name
        if name not in self._entries:
            self.used.clear()
            drafts = Drafts(self.source, self.spec.draft, ready.choice) if entry.needs_draft else None
            bound = complete(entry, ready, drafts)
            self._entries[name] = (bound, tuple(self.used))
        bound, more = self._entries[name]
        digest = hashlib.sha256("".join(map(file_digest, files + more)).encode()).hexdigest()
        return Prepared(bound, ready, settings, digest, _size(ready))


def _size(ready: Ready) -> tuple[int, int]:
    """Height and width of the pictures of a model."""
    model: Any = ready.model
    stride = cast(Any, ready.decoder).net.config.stride
    side = model.net.config.grid * model.patch if ready.masked else model.grid
    return side * stride, side * stride


# ------------------------------------------------------------------------------------------------ conditions


class Conditions:
    """What image i shows: entry i modulo the number of labels or prompts, so that they are balanced over any range.

    Args:
        spec: labels or prompts.
        models: for the language model or the text encoder of a model; the first use loads it.
    """

    def __init__(self, spec: Spec, models: Models):
        self.spec, self._models = spec, models
        self._language: Any = None
        self._reader: tuple[Ready, TATokModel | None] | None = None
        self._encoded: tuple[Ready, dict[str, Any]] | None = None
        self._about: tuple[Ready, dict[str, Any]] | None = None

    def about(self, ready: Ready) -> dict[str, Any]:
        """What the pictures of a model depend on: its labels, or its prompts, with the digest of the files that read them.

        Raises:
            UserError: labels for a model of prompts, or the reverse, or an unknown label.
        """
        if self._about is None or self._about[0] is not ready:
            self._about = (ready, self._described(ready))
        return self._about[1]

    def _described(self, ready: Ready) -> dict[str, Any]:
        if not ready.draws_from_text:
            if self.spec.prompts:
                raise UserError(f"prompts: {ready.model.name} draws classes; leave the prompts out, or name labels.")
            return {"labels": list(self._all_labels(ready).labels)}
        if not self.spec.prompts:
            raise UserError(f"prompts: {ready.model.name} draws from text; name a file of prompts in the spec.")
        if self.spec.labels:
            raise UserError(f"labels: {ready.model.name} draws from text; leave the labels out.")
        self._language = self._reader = self._encoded = None  # so that their files are found again
        self._models.used.clear()
        self.of(ready, 0, 1)
        files = [file_digest(path) for path in self._models.used]
        return {"prompts": list(self.spec.texts), "settings": self.spec.prompt_settings, "files": files}

    def of(self, ready: Ready, first: int, count: int) -> tuple[AnyCondition, np.ndarray]:
        """The condition of a range of images, and what the shard stores: class ids int64 [count] or prompts, text [count]."""
        if not ready.draws_from_text:
            every = self._all_labels(ready)
            condition = every.of([i % len(every) for i in range(first, first + count)])
            return condition, np.array(condition.labels, dtype=np.int64)
        texts = [self.spec.texts[i % len(self.spec.prompts)] for i in range(first, first + count)]
        return self._of_texts(ready, texts, first), np.array(texts)

    def _all_labels(self, ready: Ready) -> Condition:
        known = ready.model.label_set if ready.model.label_set in label_sets() else ""
        words = self.spec.labels or tuple(map(str, range(ready.classes)))
        condition = resolve_labels("\n".join(words), known, field="labels")
        condition.class_ids(ready.classes, ready.model.label_set, ready.device)
        return condition

    def _of_texts(self, ready: Ready, texts: list[str], first: int) -> AnyCondition:
        if ready.family == HYBRID:
            return PromptCondition(tuple(texts))
        if ready.family != TAR:
            return self._encode(ready, texts)
        if self._language is None:
            choice = language_model_for(ready) if self.spec.tar == AUTO else self.spec.tar
            self._language = load_language_model(choice, self._models.source)
        model, stated = self._language
        settings = prompt_settings(stated, self.spec.prompt_settings)

        def start(part: range) -> Any:
            images = range(first + part.start, first + part.stop)
            own = [texts[i] for i in part]
            return tar_prompt(model, own, settings, PairedDraws(self.spec.seed, images), self.spec.seed)

        codes = _finished(in_parts(start, len(texts))).condition
        if self._reader is None or self._reader[0] is not ready:
            self._reader = (ready, load_reader(ready, self._models.source, self.spec.ta_tok))
        reader = self._reader[1]
        return codes if reader is None else features_of(codes, reader)

    def _encode(self, ready: Ready, texts: list[str]) -> TextCondition:
        if self._encoded is None or self._encoded[0] is not ready:
            from ..model_loaders.text import load_text_encoder

            encoder = load_text_encoder(self._models.source.find(self.spec.encoder, "t5"), AUTO, ready.device)
            every = list(dict.fromkeys(self.spec.texts))
            # One prompt at a time: the batch of an encoder changes the last bits.
            self._encoded = (ready, {text: encoder.encode([text])[0] for text in every})
        return TextCondition(tuple(self._encoded[1][text] for text in texts), tuple(texts))


def _finished(steps: Any, progress: Progress | None = None) -> Any:
    """The result of a generator that is run to its end."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value
        if progress is not None:
            progress(step.done, step.total)


# ------------------------------------------------------------------------------------------------ shards


class Worker:
    """Draws shards of a store.

    Args:
        store: where they go; its cells are planned.
        models: see :class:`Models`.
        conditions: see :class:`Conditions`.
    """

    def __init__(self, store: Store, models: Models, conditions: Conditions | None = None):
        self.store, self.models = store, models
        self.conditions = conditions or Conditions(models.spec, models)
        self.name = f"{host()}-{os.getpid()}"
        self._warm: set[tuple[str, str, str]] = set()
        self._machine = machine(models.source.device)["processor"]

    def run_shard(self, job: Job, progress: Progress | None = None) -> Shard:
        """Draw a shard and write it.

        Args:
            progress: called after every step of the sampler.

        Returns:
            The shard's record.

        Raises:
            UserError: the model's files changed, memory is insufficient for one image, the disk is full, or the result is not finite.
        """
        began = time.perf_counter()
        cell = self.store.cell(job.cell)
        prepared = self.models.restore(cell)
        condition, labels = self.conditions.of(prepared.ready, job.first, job.count)
        self._warm_up(cell, prepared, condition)
        pictures, report, most = draw(prepared, condition, cell.seed, job.first, job.at_most, progress)
        shard = Shard(
            key=shard_key(cell.key, job.first, job.count),
            first=job.first,
            count=job.count,
            batch=job.count,
            retried_batch=most if most < job.count else None,
            sha256="",
            bytes=0,
            counts=dict(sorted(report.counts.items())),
            accepted=report.counts.get("accepted", 0),
            verified=report.counts.get("accepted", 0) + report.counts.get("rejected", 0),
        )
        about = {
            "first": job.first,
            "count": job.count,
            "seconds": report.seconds,
            "wall": time.perf_counter() - began,
            "ended": time.time(),
            "phases": report.phases,
            "worker": self.name,
            "machine": self._machine,
            "threads": torch.get_num_threads(),
            "peak_memory_bytes": report.peak_memory_bytes,
        }
        return self.store.write_shard(cell, shard, pictures, labels, about)

    def _warm_up(self, cell: Cell, prepared: Prepared, condition: AnyCondition) -> None:
        """Warm up once for every model and token sampler."""
        name = (cell.family, cell.model, "" if FAMILIES[cell.family].masked else cell.sampler)
        if name in self._warm:
            return
        self._warm.add(name)
        warm_up(prepared.entry, prepared.ready, prepared.settings, condition)


def draw(
    prepared: Prepared,
    condition: AnyCondition,
    seed: int,
    first: int,
    at_most: int = 0,
    progress: Progress | None = None,
) -> tuple[np.ndarray, Report, int]:
    """Pictures uint8 [n, H, W, 3] of a condition, the report, and how many images were sampled at once.

    Args:
        first: index of the first image.
        at_most: images sampled at once; 0 for all.

    Raises:
        UserError: memory is insufficient for one image, or the result is not finite.
    """
    parts: list[range] = []

    def start(part: range) -> Any:
        parts.append(part)
        if at_most and len(part) > at_most:
            raise MemoryError  # as if memory were insufficient, which it was in a process that was killed for it
        return begin(prepared.entry, prepared.ready, prepared.settings, condition, seed, first, part)

    made = _finished(in_parts(start, len(condition)), progress)
    if prepared.ready.masked and not bool(made.latents.isfinite().all()):
        raise UserError(f"{prepared.entry.name}: it ended in numbers that are not finite; choose dtype fp32.")
    pictures = decode(prepared.ready, made).numpy()
    whole = [len(p) for p in parts if p.stop < len(condition) or p.start == 0]
    return pictures, made.report, min(whole)


def use(numbers: dict[str, Any]) -> None:
    """Set product method and threads of this process, see :func:`numerics`."""
    if numbers["threads"]:
        torch.set_num_threads(numbers["threads"])
