"""Draw many images of every combination of samplers and settings, on any number of workers, so that they can be compared.

SPEC is a TOML or JSON file; docs/scale.md describes it. A cell is one combination. Its images are cut into shards of --batch images;
a finished shard is never drawn again, so the same command goes on after an interruption, with other workers, or with more images.
Image i of every cell starts from the noise of (seed, i) and shows the same class or prompt. The table printed at the end depends on
the pictures alone: it is the same for every number of workers.

Several processes may work on one folder at once. With RANK and WORLD_SIZE set, as torchrun does, each takes its part of the
shards. With --ray the shards are distributed by Ray.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..assembly import AUTO, Source
from ..errors import UserError
from ..model_loaders.checkpoint import DTYPES, INT8
from ..model_loaders.networks.speed import PLAIN
from ..scale.claims import Claims
from ..scale.estimate import Estimate, estimates, paired, time_cell
from ..scale.export import FORMATS, export
from ..scale.folder import host
from ..scale.local import Done, jobs_of, unfinished
from ..scale.local import run as run_here
from ..scale.plan import manifest, plan
from ..scale.ray_engine import Cluster, connect, has_gpus
from ..scale.ray_engine import run as run_on_ray
from ..scale.spec import Spec, read_spec, with_values
from ..scale.store import Cell, Shard, Store
from ..scale.work import Conditions, Job, Models, Prepared, Progress, Worker, machine, numerics, use
from .options import models_folder, ranks, source, whole
from .progress import Bar

SIZES, ALL = "sizes", "all"
# Options that replace an entry of the spec, with their ranges checked there.
_NUMBERS = ("images", "batch", "seed", "threads")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("spec", type=Path, metavar="SPEC", help="the sweep: a TOML or JSON file")
    parser.add_argument("--out", metavar="DIR", help="folder of the sweep, or an address such as s3://bucket/sweep")
    parser.add_argument("--images", metavar="N", help="images of every cell; default the spec's")
    parser.add_argument("--batch", metavar="N", help="images of a shard, sampled at once; default the spec's, or 50")
    parser.add_argument("--seed", metavar="N", help="seed of the noise; default the spec's, or 0")
    parser.add_argument("--dry-run", action="store_true", help="print cells, shards, time and disk; draw nothing")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="also write the pictures of finished cells for other programs: npz (ADM's evaluator), png (with prompts in GenEval's "
        "folders), webdataset (tar files)",
    )
    parser.add_argument(
        "--verify",
        choices=(SIZES, ALL),
        help="what is compared of shards that are finished already: all their bytes (default in a local folder) or the files' sizes "
        "(default elsewhere)",
    )
    parser.add_argument("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument("--dtype", choices=(AUTO, *DTYPES, INT8), help="weights; default the spec's, or auto")
    parser.add_argument("--threads", metavar="N", help="threads of a worker on a CPU; default this process's")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="distribute the shards with Ray: on the cluster at this address, or on this machine; needs fastar-nodes[scale]",
    )
    parser.add_argument(
        "--workers", metavar="N", help="with --ray: workers; default as many as the cluster has room for now"
    )
    parser.add_argument(
        "--cpus", metavar="N", help="with --ray: CPUs of a worker; default its threads, or 1 beside a GPU"
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder of weight files, as for the other commands")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    rank, world, local = ranks()
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
    cells = plan(spec, models, conditions, numbers)
    store.write_manifest(manifest(spec, numbers), cells)
    jobs = _left(store, jobs_of(store, cells, rank, world), options.verify)
    began = datetime.now(timezone.utc)
    engine = f"process {rank} of {world}" if cluster is None else "ray"
    run_ = {"engine": engine, "started": began.isoformat(timespec="seconds"), "seconds": 0.0}
    run_ |= {**machine(files.device), **numbers}
    name = f"{began:%Y%m%dT%H%M%S}-{os.getpid()}-{host()}"
    store.write_run(name, run_)
    started = time.perf_counter()
    try:
        if cluster is None:
            worker = Worker(store, models, conditions)
            _draw(store, jobs, lambda claims, done, steps: run_here(store, jobs, worker, claims, done, steps))
        else:
            own = replace(cluster, cpus=cluster.cpus or numbers["threads"] or 1)
            folder = models_folder(options.models)
            _draw(store, jobs, lambda claims, done, _: run_on_ray(store, jobs, own, folder, numbers, claims, done))
    finally:
        store.write_run(name, {**run_, "seconds": time.perf_counter() - started})
        store.write_timing(paired(store))
    return _finish(store, cells, options, rank)


def _spec(options: argparse.Namespace) -> Spec:
    """The spec with the options in place of its entries."""
    limits = {"images": (1, 10_000_000), "batch": (1, 4096), "seed": (0, (1 << 64) - 1), "threads": (1, 1024)}
    given = {n: getattr(options, n) for n in _NUMBERS if getattr(options, n) is not None}
    values: dict[str, Any] = {name: whole(text, name, *limits[name]) for name, text in given.items()}
    spec = with_values(read_spec(options.spec), **values, dtype=options.dtype)
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
        raise UserError("ray: WORLD_SIZE is set too; distribute the shards by one of them.")
    cluster = Cluster(options.ray, numbers.get("workers", 0), numbers.get("cpus", 0))
    ray = connect(cluster)
    return replace(cluster, gpu=options.device.startswith("cuda") or options.device == AUTO and has_gpus(ray))


def _files(options: argparse.Namespace, spec: Spec, local: int, cluster: Cluster | None) -> Source:
    """Where models are. Of several processes on a machine each takes a CUDA device of its own; with Ray this process only plans, on
    the CPU."""
    if cluster is not None:
        device = torch.device("cuda" if cluster.gpu else "cpu")
        if cluster.gpu and spec.dtype == AUTO and not torch.cuda.is_available():
            raise UserError(
                "dtype: this machine has no GPU to choose it by; name the one of the workers, for example --dtype bf16."
            )
        settings = argparse.Namespace(models=options.models, device="cpu", dtype=spec.dtype, speed=PLAIN)
        return replace(source(settings), compute=device)
    settings = argparse.Namespace(models=options.models, device=options.device, dtype=spec.dtype, speed=PLAIN)
    found = source(settings)
    if local and options.device == AUTO and found.device.type == "cuda":
        settings.device = (
            f"cuda:{local % torch.cuda.device_count()}"  # a scheduler may show each process its own device only
        )
        found = source(settings)
    return found


def _numerics(spec: Spec, files: Source, store: Store | None, cluster: Cluster | None) -> dict[str, Any]:
    """See :func:`.work.numerics`; the threads are those of the folder's earlier run, or the CPUs of Ray's workers, unless the user names
    a number."""
    numbers = numerics(spec, files)
    if cluster is not None and not cluster.gpu and not spec.threads:
        numbers["threads"] = cluster.cpus or 1
    if store is not None and not spec.threads and store.exists():
        before = store.manifest().get("numerics", {})
        if isinstance(before, dict) and before.get("device") == numbers["device"] and before.get("threads"):
            numbers["threads"] = int(before["threads"])
    return numbers


# ------------------------------------------------------------------------------------------------ drawing


def _left(store: Store, jobs: list[Job], verify: str | None) -> list[Job]:
    """The jobs that are not finished; prints how many there are."""
    whole_ = (verify or (ALL if store.folder.local else SIZES)) == ALL
    with Bar("checking finished shards") as bar:
        left, damaged = unfinished(store, jobs, whole_, lambda done, total: bar(done, total, "shards"))
    if damaged:
        print(f"{damaged} shard{'s' * (damaged > 1)} did not match the record and will be drawn again", file=sys.stderr)
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} shards are finished already", file=sys.stderr)
    return left


# An engine: with claims, called after each job, and called with the steps of the running shard. Returns how many workers ended early.
Engine = Callable[[Claims, Done, Progress], int]


def _draw(store: Store, jobs: list[Job], engine: Engine) -> None:
    """Draw the jobs with a progress bar.

    Raises:
        KeyboardInterrupt: interrupted or terminated; what is finished stays.
    """
    total, finished = sum(job.count for job in jobs), [0, 0]
    size = max((job.count for job in jobs), default=1)
    with _terminated(), Bar("drawing") as bar, Claims(store.folder) as claims:

        def done(job: Job, shard: Shard | None) -> None:
            finished[0] += job.count
            finished[1] += 1
            bar(finished[0], total, "images")
            if shard is not None and shard.retried_batch is not None:
                print(f"{job.cell}: memory was insufficient for {job.count} images at once", file=sys.stderr)

        try:
            ended = engine(claims, done, lambda a, b: bar(finished[0] + size * a / (b or 1), total, "images"))
        except KeyboardInterrupt:
            text = f"{finished[1]} of {len(jobs)} shards were finished in this run; the same command goes on from there"
            print(f"\n{text}", file=sys.stderr)
            raise
    if ended:
        print(f"{ended} workers ended early; what they were drawing was drawn again", file=sys.stderr)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM, which schedulers send before they end a process, interrupts like Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _finish(store: Store, cells: list[Cell], options: argparse.Namespace, rank: int) -> int:
    """Print the table; export where asked. Of several processes only the first does so."""
    if rank:
        return 0
    missing = sum(len(store.ranges(cell)) - len(store.shards(cell)) for cell in cells)
    store.write_reports()
    print(store.table())
    if missing:
        print(f"{missing} shards are not finished; other processes may be at work on them")
    if options.format:
        for cell in cells:
            if len(store.shards(cell)) == len(store.ranges(cell)):
                print(f"written: {export(store, cell, options.format)}")
    return 0


# ------------------------------------------------------------------------------------------------ dry run


def _dry_run(spec: Spec, models: Models, conditions: Conditions, numbers: dict[str, Any], store: Store | None) -> int:
    """Print what a sweep would cost; nothing is written."""
    seconds: dict[str, float] = {}

    def measure(cell: Cell, prepared: Prepared) -> None:
        seconds[cell.id] = time_cell(prepared, conditions, cell, spec.batch)

    cells = plan(spec, models, conditions, numbers, measure)
    found = estimates(cells, seconds, spec.batch)
    done = sum(e.shards - left for e, left in zip(found, _missing(store, cells, found), strict=True))
    print(_estimate_table(found))
    shards, images = sum(e.shards for e in found), sum(cell.images for cell in cells)
    hours, disk = sum(e.seconds for e in found) / 3600, sum(e.disk for e in found)
    print(
        f"\n{len(cells)} cells, {shards} shards of at most {spec.batch} images, {images:,} images, {disk / 1e6:,.0f} MB on disk; "
        f"about {_duration(hours * 3600)} with one worker like this machine."
    )
    sizes = sorted({cell.size for cell in cells})
    if len(sizes) > 1:
        print(f"The cells have pictures of {' and '.join(f'{w} x {h}' for h, w in sizes)} pixels.")
    if done:
        print(f"{done} shards are finished already.")
    return 0


def _missing(store: Store | None, cells: list[Cell], found: list[Estimate]) -> list[int]:
    """Shards of every cell that are not in the folder."""
    if store is None:
        return [e.shards for e in found]
    there = [sum(store.shard(e.cell, *r) is not None for r in _ranges(e)) for e in found]
    return [e.shards - n for e, n in zip(found, there, strict=True)]


def _ranges(e: Estimate) -> list[tuple[int, int]]:
    size = -(-e.cell.images // e.shards)
    return [(first, min(size, e.cell.images - first)) for first in range(0, e.cell.images, size)]


def _estimate_table(found: list[Estimate]) -> str:
    rows = [["cell", "shards", "s / image", "time", "speed-up", "MB"]]
    for e in found:
        speed = "" if e.ratio is None else f"{e.ratio:.2f}x"
        each = e.seconds / e.cell.images
        rows.append([e.cell.id, str(e.shards), f"{each:.3f}", _duration(e.seconds), speed, f"{e.disk / 1e6:,.0f}"])
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *text[1:]])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
