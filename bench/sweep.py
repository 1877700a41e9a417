"""Draw many images of every combination of samplers and settings, on any number of workers, so that they can be compared.

SPEC is a TOML or JSON file; docs/scale.md describes it. A cell is one combination. Its images are cut into shards of
--batch images; a finished shard is never drawn again, so the same command goes on after an interruption, with other
workers, or with more images. Image i of every cell starts from the noise of (seed, i) and shows the same class or
prompt. The table printed at the end depends on the pictures alone: it is the same for every number of workers.

With RANK and WORLD_SIZE set, as torchrun does, a process takes its part of the images. With --ray they are distributed
by Ray.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from ..assembly import AUTO, Source
from ..cli.options import models_folder, source, whole
from ..cli.progress import Bar
from ..errors import UserError
from ..model_loaders.families import DTYPES, INT8
from ..model_loaders.networks.speed import PLAIN
from ..reports.files import typed_path
from ..reports.table import markdown
from .engines import Cluster, Task, connect, run_here, run_on_ray, tasks_of, unfinished
from .records import Cell, Shard, ranges
from .records import whole as in_range
from .spec import LIMITS, Spec, read_spec, with_values
from .store import Store
from .work import Conditions, Models, Prepared, Worker, draw, manifest, numerics, plan, use

# Options that replace an entry of the spec.
_NUMBERS = ("images", "batch", "seed", "threads")
# Images of a cell that are timed on a CPU; on other devices a whole batch, on which their speed depends.
CPU_IMAGES = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("spec", metavar="SPEC", help="the sweep: a TOML or JSON file")
    parser.add_argument("--out", metavar="DIR", help="folder of the sweep, or an address such as s3://bucket/sweep")
    parser.add_argument("--images", metavar="N", help="images of every cell; default the spec's")
    parser.add_argument("--batch", metavar="N", help="images of a shard, sampled at once; default the spec's, or 50")
    parser.add_argument("--seed", metavar="N", help="seed of the noise; default the spec's, or 0")
    parser.add_argument("--dry-run", action="store_true", help="print cells, shards, time and disk; draw nothing")
    parser.add_argument("--png", action="store_true", help="also write PNG files, with prompts in GenEval's folders")
    parser.add_argument("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument("--dtype", choices=(AUTO, *DTYPES, INT8), help="weights; default the spec's, or auto")
    parser.add_argument("--threads", metavar="N", help="threads of a worker on a CPU; default this process's")
    where = "distribute the images with Ray, on the cluster at this address or on this machine"
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=where)
    parser.add_argument("--workers", metavar="N", help="with --ray: workers; default as many as there is room for now")
    parser.add_argument("--cpus", metavar="N", help="with --ray: CPUs of a worker; default threads, 1 beside a GPU")
    parser.add_argument("--models", metavar="DIR", help="folder of weight files, as for the other commands")


def _ranks() -> tuple[int, int, int]:
    """(RANK, WORLD_SIZE, LOCAL_RANK) of this process, as torchrun sets them; (0, 1, 0) without them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name, usual) for name, usual in zip(names, "010", strict=True)]
    rank, world, local = (int(text) if text.isdecimal() and len(text) <= 6 else -1 for text in texts)
    if not 0 <= rank < world or local < 0:
        given = ", ".join(f"{name} {text[:20]!r}" for name, text in zip(names, texts, strict=True))
        raise UserError(f"RANK: {given} are not a rank and a larger number; set them as torchrun does, or unset them.")
    return rank, world, local


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    rank, world, local = _ranks()
    spec = _spec(options)
    if not options.out and not options.dry_run:
        raise UserError("out: no folder is named; give --out DIR, or --dry-run to see what would be drawn.")
    cluster = _cluster(options, world)
    files = _files(options, spec, local if world > 1 else 0, cluster)
    store = Store(options.out) if options.out else None
    numbers = _numerics(spec, files, store, cluster)
    use(numbers)
    models = Models(spec, files)
    conditions = Conditions(spec, models)
    if store is None or options.dry_run:
        return _dry_run(spec, models, conditions, numbers, store)
    store.folder.check("out")
    store.expect_same(manifest(spec, numbers))
    cells = plan(spec, models, conditions, numbers)
    store.write_manifest(manifest(spec, numbers), cells)
    tasks = _left(store, tasks_of(store, cells, rank, world))
    if cluster is None:
        _draw(tasks, run_here(Worker(store, models, conditions), tasks))
    else:
        own = replace(cluster, cpus=cluster.cpus or numbers["threads"] or 1)
        _draw(tasks, run_on_ray(store, spec, tasks, own, models_folder(options.models), numbers))
    if rank == 0:
        _finish(store, cells, spec if options.png else None)
    return 0


def _spec(options: argparse.Namespace) -> Spec:
    """The spec with the options in place of its entries."""
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    values: dict[str, Any] = {name: whole(text, name, *LIMITS[name]) for name, text in given.items()}
    spec = with_values(read_spec(typed_path(options.spec, "spec")), **values, dtype=options.dtype)
    if not spec.images:
        raise UserError("images: the spec names no number of images; give --images.")
    return spec


def _cluster(options: argparse.Namespace, world: int) -> Cluster | None:
    """The cluster of --ray, connected; None without it."""
    numbers = {name: whole(text, name, 1, 65536) for name in ("workers", "cpus") if (text := getattr(options, name))}
    if options.ray is None:
        if numbers:
            raise UserError(f"{next(iter(numbers))}: it is for --ray; add that, or leave it out.")
        return None
    if world > 1:
        raise UserError("ray: WORLD_SIZE is set too; distribute the images by one of them.")
    cluster = Cluster(options.ray, numbers.get("workers", 0), numbers.get("cpus", 0))
    ray = connect(cluster)
    gpus = options.device == AUTO and ray.cluster_resources().get("GPU", 0) >= 1
    return replace(cluster, gpu=gpus or options.device.startswith("cuda"))


def _files(options: argparse.Namespace, spec: Spec, local: int, cluster: Cluster | None) -> Source:
    """Where models are. Each process of a machine takes a CUDA device of its own; with Ray this one only plans, on the CPU."""
    settings = argparse.Namespace(models=options.models, device=options.device, dtype=spec.dtype, speed=PLAIN)
    if cluster is not None:
        if cluster.gpu and spec.dtype == AUTO and not torch.cuda.is_available():
            raise UserError("dtype: this machine has no GPU to choose it by; name it, for example --dtype bf16.")
        settings.device = "cpu"
        return replace(source(settings), compute=torch.device("cuda" if cluster.gpu else "cpu"))
    if local and options.device == AUTO and torch.cuda.is_available():
        # A scheduler may show each process its own device only.
        settings.device = f"cuda:{local % torch.cuda.device_count()}"
    return source(settings)


def _numerics(spec: Spec, files: Source, store: Store | None, cluster: Cluster | None) -> dict[str, Any]:
    """See :func:`.work.numerics`; threads are the named number, else that of the folder's earlier run, else Ray's CPUs."""
    numbers = numerics(spec, files)
    if spec.threads or numbers["device"] != "cpu":
        return numbers
    if cluster is not None:
        numbers["threads"] = cluster.cpus or 1
    before = (store.manifest() if store is not None else None) or {}
    recorded = before.get("numerics")
    if isinstance(recorded, dict) and recorded.get("device") == "cpu":
        threads = recorded.get("threads")
        if not in_range(threads, 1, LIMITS["threads"][1]):
            raise UserError(f"threads: the folder's manifest names {str(threads)[:40]!r}; give --threads.")
        numbers["threads"] = threads
    return numbers


def _left(store: Store, tasks: Sequence[Task]) -> list[Task]:
    """The tasks that are not finished; prints how many shards are. Pictures are read again only of a local folder."""
    left, damaged = unfinished(store, tasks, whole=store.folder.local)
    if damaged:
        print(f"{damaged} shard{'s' * (damaged > 1)} did not match the record and will be drawn again", file=sys.stderr)
    every, missing = _shards(tasks), _shards(left)
    if missing < every:
        print(f"{every - missing} of {every} shards are finished already", file=sys.stderr)
    return left


def _shards(tasks: Sequence[Task]) -> int:
    return sum(len(task.cells) for task in tasks)


def _draw(tasks: Sequence[Task], drawn: Iterator[tuple[str, Shard]]) -> None:
    """Draw the tasks with a progress bar."""
    total, finished = _shards(tasks), 0
    with Bar("drawing") as bar:
        try:
            for cell, shard in drawn:
                finished += 1
                bar(finished, total, "shards")
                if shard.note:
                    print(f"{cell}, image {shard.first} on: {shard.note}", file=sys.stderr)
        except KeyboardInterrupt:
            text = f"{finished} of {total} shards were finished in this run; the same command goes on from there"
            print(f"\n{text}", file=sys.stderr)
            raise


def _finish(store: Store, cells: Sequence[Cell], exported: Spec | None) -> None:
    """Print the table; export the pictures with the prompts of a spec."""
    print(store.table())
    finished = [cell for cell in cells if len(store.shards(cell)) == len(store.ranges(cell))]
    if len(finished) < len(cells):
        print(f"{len(cells) - len(finished)} cells are not finished; other processes may be at work on them")
    if exported is not None:
        for cell in finished:
            print(f"written: {export(store, cell, exported.prompts)}")


def export(store: Store, cell: Cell, prompts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write all pictures of a cell below the folder ``export`` of the sweep; returns the folder."""
    name = f"export/{cell.id}"
    for i, about in enumerate(prompts):
        store.folder.write(f"{name}/{i:05d}/metadata.jsonl", json.dumps(about, ensure_ascii=False).encode())
    for shard in store.shards(cell):
        for index, picture in enumerate(store.pictures(cell, shard), shard.first):
            out = io.BytesIO()
            Image.fromarray(picture).save(out, "PNG", compress_level=4)
            path = f"{index:07d}.png"
            if prompts:
                path = f"{index % len(prompts):05d}/samples/{index // len(prompts):05d}.png"
            store.folder.write(f"{name}/{path}", out.getvalue())
    return name


def _dry_run(spec: Spec, models: Models, conditions: Conditions, numbers: dict[str, Any], store: Store | None) -> int:
    """Print what a sweep would cost; nothing is written."""
    seconds: dict[str, float] = {}

    def measure(cell: Cell, prepared: Any) -> None:
        seconds[cell.id] = time_cell(prepared, conditions, cell, spec.batch)

    cells = plan(spec, models, conditions, numbers, measure)
    print(markdown(estimates(cells, seconds, spec.batch)))
    shards, images = sum(-(-cell.images // spec.batch) for cell in cells), sum(cell.images for cell in cells)
    total = duration(sum(seconds[cell.id] * cell.images for cell in cells))
    print(f"\n{len(cells)} cells, {shards} shards of at most {spec.batch} images, {images:,} images, ", end="")
    print(f"{sum(map(disk, cells)) / 1e6:,.0f} MB on disk; about {total} with one worker like this machine.")
    if store is not None:
        done = sum(store.shard(cell, *part) is not None for cell in cells for part in ranges(cell.images, spec.batch))
        if done:
            print(f"{done} shards are finished already.")
    return 0


def time_cell(prepared: Prepared, conditions: Conditions, cell: Cell, batch: int) -> float:
    """Seconds per image of a short run, sampler and decoder, after a shorter one that is not timed."""
    on_cpu = prepared.ready.device.type == "cpu"
    count = min(batch, cell.images, CPU_IMAGES) if on_cpu else min(batch, cell.images)
    condition, _ = conditions.of(prepared.ready, 0, count)
    draw(prepared, condition.of(range(1)), cell.seed, 0)
    began = time.perf_counter()
    draw(prepared, condition, cell.seed, 0)
    return (time.perf_counter() - began) / count


def duration(seconds: float) -> str:
    """A duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimates(cells: Sequence[Cell], seconds: Mapping[str, float], batch: int) -> list[list[str]]:
    """Rows of a table: shards, seconds, speed-up and disk of every cell, from its seconds per image by id."""
    rows = [["cell", "shards", "s / image", "time", "speed-up", "MB"]]
    for cell in cells:
        own, base = seconds[cell.id], seconds.get(cell.baseline or "")
        speed = "" if base is None else f"{base / own:.2f}x"
        row = [cell.id, str(-(-cell.images // batch)), f"{own:.3f}", duration(own * cell.images), speed]
        rows.append([*row, f"{disk(cell) / 1e6:,.0f}"])
    return rows


def disk(cell: Cell) -> int:
    """Bytes of all pictures of a cell."""
    return cell.images * cell.size[0] * cell.size[1] * 3
