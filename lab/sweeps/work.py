"""Planning and drawing: from a spec to cells, models that stay loaded, conditions by image index, and shards."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ...cli.bench import machine
from ...cli.conditions import builder
from ...errors import UserError
from ...model_loaders.catalogue.transfer import sha256_of
from ...reports.files import typed_path
from ...reports.quality import DISTRIBUTION
from ...reports.record import Report
from ...runs.baseline import ComparedRun, candidates, is_lossless
from ...runs.choice import Choice
from ...runs.drawing import Drawing, decode
from ...runs.loading import AUTO, Drafts, Ready, Source, beside, load
from ...runs.registry import ALGORITHM, Entry, find
from ...samplers.conditioning import AnyCondition, ClassCondition
from ...samplers.engine import finish
from ...samplers.settings import settings_from
from ...samplers.tokens.mulosd.drafting import BICUBIC
from ...sweeps.keys import cell_key, cell_name, digest
from ...sweeps.plan import Combination
from .folder import host
from .records import Cell, Shard, shard_key
from .spec import Spec, expand, models_of
from .store import Store


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sampler on its model."""

    entry: Entry
    ready: Ready  # the model
    settings: Any  # all settings
    beside: Mapping[str, Any]  # its draft model and up-sampler
    digest: str  # of all files that the images depend on, and of what the loaders decided
    size: tuple[int, int]  # height and width of an image

    def drawing(self, condition: AnyCondition, seed: int, first: int) -> Drawing:
        """A run; image i of the condition uses (seed, first + i)."""
        numbers = range(first, first + len(condition))
        return Drawing(self.entry, self.ready.model, self.settings, condition, seed, numbers, **self.beside)


def numerics(spec: Spec, source: Source) -> dict[str, Any]:
    """What decides the last bits of an image beside the model: device type, dtype, threads."""
    device = (source.compute or source.device).type

    threads = 0
    if device == "cpu":
        threads = spec.threads or torch.get_num_threads()

    return {"device": device, "dtype": source.dtype, "threads": threads}


def use(numbers: Mapping[str, Any]) -> None:
    """Set the threads of this process, see :func:`numerics`."""
    if numbers["threads"]:
        torch.set_num_threads(numbers["threads"])


def file_digest(path: Path) -> str:
    """sha256 of a file, or of the files of a folder with their names."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        text = "".join(f"{p.relative_to(path).as_posix()}:{file_digest(p)};" for p in inside)
        return hashlib.sha256(text.encode()).hexdigest()

    return sha256_of(path)


class Models:
    """Models of a process, whose files enter the digests.

    The last one stays loaded, with the samplers prepared on it.
    """

    def __init__(self, spec: Spec, source: Source):
        self.spec = spec
        self.used: list[Path] = []  # files found since it was last cleared
        self._find = source.find
        self.source = replace(source, find=self._recorded)

        # The loaded model by family and choice, and the samplers prepared on it by name, each with its files.
        self._loaded: tuple[tuple[str, str], Ready, list[Path]] | None = None
        self._entries: dict[str, tuple[dict[str, Any], list[str]]] = {}

    def _recorded(self, choice: str, family: str) -> Path:
        """The file of a choice, which is added to those that were used."""
        path = self._find(choice, family)
        self.used.append(path)
        return path

    def _ready(self, family: str, choice: str) -> tuple[Ready, list[Path]]:
        """A model with the files of model and decoder; the model before it is freed."""
        if self._loaded is None or self._loaded[0] != (family, choice):
            self._loaded = None
            self._entries.clear()
            self.used.clear()

            ready = load(family, choice, self.source, self.spec.decoder)
            self._loaded = ((family, choice), ready, list(self.used))

        _, ready, files = self._loaded
        return ready, files

    def prepare(self, choice: Choice, family: str, model: str) -> Prepared:
        """A sampler on a model."""
        ready, files = self._ready(family, model)
        settings = choice.settings(ready.facts)
        return self._with(choice.entry, settings, ready, files)

    def restore(self, cell: Cell) -> Prepared:
        """The sampler of a cell."""
        entry = find(cell.sampler)
        settings = settings_from(entry.settings, cell.settings)
        ready, files = self._ready(cell.family, cell.model)

        prepared = self._with(entry, settings, ready, files)
        if prepared.digest != cell.model_digest:
            raise UserError(
                f"model: the files of {cell.model} on {host()} are not the files with which the sweep began; use the "
                "same files, or choose a different folder with --out."
            )

        return prepared

    def _with(self, entry: Entry, settings: Any, ready: Ready, files: list[Path]) -> Prepared:
        """A sampler with its settings on the loaded model, with draft model and up-sampler."""
        if entry.name not in self._entries:
            self.used.clear()
            found = beside(entry, ready, Drafts(self.source, self.spec.draft, ready.choice, self.spec.upscale_model))

            # The files hold the weights. Their names and the options may have decided the rest: grid, heads, scales.
            decided = digest(ready.model, ready.decoder, found.get("draft"), weights=False)
            contents = [file_digest(path) for path in files + self.used]
            if entry.needs_up_sampler:
                contents.append(found["up_sampler"].name)
                if self.spec.upscale_model not in (AUTO, BICUBIC):
                    contents.append(file_digest(typed_path(self.spec.upscale_model, "upscale_model")))
            self._entries[entry.name] = (found, [decided, *contents])

        found, held = self._entries[entry.name]
        return Prepared(entry, ready, settings, found, digest(held), _size(ready, settings))


def _size(ready: Ready, settings: Any) -> tuple[int, int]:
    """Height and width of the images of a model."""
    height, width = ready.kind.latents(ready.model, settings)
    stride = cast(Any, ready.decoder).net.config.output_stride
    return height * stride, width * stride


class Conditions:
    """What image i shows: entry i modulo the number of labels or prompts, so that they are balanced over any range."""

    def __init__(self, spec: Spec, models: Models):
        self.spec = spec
        self._models = models

        self._build = builder(models.source, tar=spec.tar, seed=spec.seed, asked=spec.prompt_settings)
        self._about: tuple[Ready, dict[str, Any]] | None = None

    def about(self, ready: Ready) -> dict[str, Any]:
        """What the images of a model depend on: its labels, or its prompts with the digest of the files that read
        them.
        """
        if self._about is None or self._about[0] is not ready:
            self._about = (ready, self._described(ready))

        return self._about[1]

    def _described(self, ready: Ready) -> dict[str, Any]:
        """See :meth:`about`."""
        prompts = self.spec.prompts
        if ready.condition == "class":
            if prompts:
                raise UserError(
                    f"prompts: {ready.model.name} reads classes, not prompts; leave the prompts out, or give labels."
                )
            return {"labels": list(self._labels(ready).labels)}

        if not prompts:
            raise UserError(
                f"prompts: {ready.model.name} reads prompts; give a file of prompts with --prompts or in the spec."
            )
        if self.spec.labels:
            raise UserError(f"labels: {ready.model.name} reads prompts, not labels; leave the labels out.")

        self._build.forget()  # so that the files are found again, and recorded
        self._models.used.clear()
        self.of(ready, 0, 1)
        files = [file_digest(path) for path in self._models.used]

        return {"prompts": list(prompts), "settings": self.spec.prompt_settings, "files": files}

    def _labels(self, ready: Ready) -> ClassCondition:
        """The labels of the spec, or all classes of a model."""
        words = self.spec.labels or [str(i) for i in range(ready.classes)]
        return self._build.labels(ready, "\n".join(words), field="labels")

    def of(self, ready: Ready, first: int, count: int) -> tuple[AnyCondition, np.ndarray]:
        """The condition of a range of images, and what the shard stores: class ids, int64 [count], or prompts, text
        [count].
        """
        indices = range(first, first + count)

        if ready.condition == "class":
            every = self._labels(ready)
            condition = every.for_images([i % len(every) for i in indices])
            return condition, np.array(condition.labels, dtype=np.int64)

        texts = [self.spec.prompts[i % len(self.spec.prompts)] for i in indices]
        return self._build.prompts(ready, texts, first), np.array(texts)


def plan(
    spec: Spec,
    models: Models,
    conditions: Conditions,
    numbers: Mapping[str, Any],
) -> list[Cell]:
    """The cells of a spec, by model and in the order of its samplers. Every model is loaded once."""
    combinations = expand(spec)
    chosen = models_of(spec, combinations, models.source)

    # One model after another.
    order = list(dict.fromkeys(chosen))
    planned = sorted(zip(combinations, chosen, strict=True), key=lambda one: order.index(one[1]))

    cells: dict[str, Cell] = {}
    variants: set[str] = set()  # keys of the cells that are variants of a sampler
    for combination, (family, choice) in planned:
        prepared = models.prepare(combination.choice, family, choice)
        numbers = {**numbers, "dtype": models.source.precision_name(family)}
        cell = _cell(spec, combination, choice, prepared, conditions.about(prepared.ready), numbers)

        if cell.key not in cells:  # two combinations may come to the same settings, by a preset and by a value
            cells[cell.key] = cell
            if combination.variant:
                variants.add(cell.key)

    return _with_baselines(list(cells.values()), variants)


def _cell(
    spec: Spec,
    combination: Combination,
    choice: str,
    prepared: Prepared,
    about: Mapping[str, Any],
    numbers: Mapping[str, Any],
) -> Cell:
    """A cell without its baseline. Its key is a digest of all that its images depend on."""
    name = prepared.entry.name
    family = prepared.ready.family
    settings = asdict(prepared.settings)

    drawn = {"family": family, "batch": spec.batch, **about}
    key = cell_key(prepared.digest, drawn, numbers, name, settings, spec.seed)
    return Cell(
        id=cell_name(name, key, digits=8),
        key=key,
        title=combination.title,
        model=choice,
        model_digest=prepared.digest,
        family=family,
        sampler=name,
        asked=dict(combination.asked),
        settings=settings,
        seed=spec.seed,
        images=spec.images,
        size=prepared.size,
        baseline=None,
        lossless=DISTRIBUTION if is_lossless(name, settings) else "",
    )


def _with_baselines(cells: Sequence[Cell], variants: Collection[str] = ()) -> list[Cell]:
    """The cells, each with the plain sampler's cell on the same model that has most settings in common.

    None for the plain sampler's own cells, and where there is no such cell. Controls, which are cells of the plain
    sampler with other settings, have one: see :func:`_controls`.

    Args:
        variants: keys of the cells that are variants of a sampler.
    """
    runs = []
    for cell in cells:
        runs.append(ComparedRun((cell.family, cell.model), cell.sampler, cell.settings, 0))

    chosen = most_alike(runs)
    controls = _controls(runs, chosen, [cell.key in variants for cell in cells])

    out = []
    for i in range(len(cells)):
        base = controls.get(i, chosen[i])
        name = None
        if base != i and runs[base].plain and runs[base].exact:
            name = cells[base].id
        out.append(replace(cells[i], baseline=name))

    return out


def most_alike(runs: Sequence[ComparedRun]) -> list[int]:
    """For each run the index of the baseline that is most like it, see :func:`likeness`."""
    found = []
    for run, among in zip(runs, candidates(runs), strict=True):
        likes = {i: likeness(runs[i], run) for i in among}
        found.append(max(among, key=likes.__getitem__))

    return found


def likeness(candidate: ComparedRun, run: ComparedRun) -> tuple[bool, int]:
    """Whether a candidate for the baseline of a run decodes serially, and how many settings it shares with the run."""
    is_serial = not candidate.settings.get("parallel")
    shared = sum(run.settings.get(name) == value for name, value in candidate.settings.items())
    return is_serial, shared


def _controls(runs: Sequence[ComparedRun], chosen: Sequence[int], variants: Sequence[bool]) -> dict[int, int]:
    """The controls among the cells, each with the plain cell that it is compared with.

    Of the plain sampler's cells in a group, the plain ones are the first of these that there are:

    1. those without a variant that accelerators refer to;
    2. the first one without a variant;
    3. those that accelerators refer to;
    4. the first one.

    The others are controls. Each is compared with the plain one that has most settings in common.

    Args:
        chosen: for each cell the index of the plain cell that is most alike, its own for one of the plain sampler.
        variants: of each cell, whether it is a variant of its sampler.
    """
    referred_to = {base for i, base in enumerate(chosen) if base != i}
    groups: dict[Any, list[int]] = {}
    for i, base in enumerate(chosen):
        if base == i and runs[i].plain and runs[i].exact:
            groups.setdefault(runs[i].group, []).append(i)

    found: dict[int, int] = {}
    for group in groups.values():
        usual = [i for i in group if not variants[i]]
        of_usual = [i for i in usual if i in referred_to]
        plain = of_usual or usual[:1] or [i for i in group if i in referred_to] or group[:1]

        for i in group:
            if i not in plain:
                alike = {k: likeness(runs[k], runs[i]) for k in plain}
                found[i] = max(plain, key=alike.__getitem__)

    return found


def manifest(spec: Spec, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What the store records of a spec. It is the same for every process of a sweep."""
    return {"algorithm": ALGORITHM, "batch": spec.batch, "numerics": dict(numbers), "spec": asdict(spec)}


class Worker:
    """Draws shards of a store whose cells are planned."""

    def __init__(self, store: Store, models: Models, conditions: Conditions | None = None):
        self.store = store
        self.models = models
        self.conditions = conditions or Conditions(models.spec, models)
        self.name = f"{host()}-{os.getpid()}"
        self._warm: set[tuple[str, str, str]] = set()
        self._machine = "{name}, torch {torch}".format_map(machine(models.source.device))

    def run_shard(self, cell: Cell, first: int, count: int) -> Shard:
        """Draw a shard and write it; returns its record."""
        began = time.perf_counter()

        prepared = self.models.restore(cell)
        condition, labels = self.conditions.of(prepared.ready, first, count)
        self._warm_up(cell, prepared, condition)
        pictures, report = draw(prepared, condition, cell.seed, first)

        counts = dict(sorted(report.counts.items()))
        shard = Shard(shard_key(cell.key, first, count), first, count, report.note, counts=counts)
        times = {
            "seconds": report.seconds,
            "wall": time.perf_counter() - began,
            "worker": self.name,
            "machine": self._machine,
            "peak_memory_bytes": report.peak_memory_bytes,
        }
        return self.store.write_shard(cell, shard, pictures, labels, times)

    def _warm_up(self, cell: Cell, prepared: Prepared, condition: AnyCondition) -> None:
        """Run a step once for every model, of token models for every sampler.

        The first call in a process includes the initialisation of libraries.
        """
        name = (cell.family, cell.model, cell.sampler if prepared.entry.family.codes else "")
        if name in self._warm:
            return

        self._warm.add(name)
        prepared.drawing(condition.for_images(range(1)), 0, 0).warm_up()


def draw(prepared: Prepared, condition: AnyCondition, seed: int, first: int) -> tuple[np.ndarray, Report]:
    """Images uint8 [n, H, W, 3] of a condition whose first image has the index ``first``, and the report."""
    made = finish(prepared.drawing(condition, seed, first).steps())
    return decode(prepared.ready, made).numpy(), made.report
