"""Draw many images of every combination of samplers and settings, on any number of workers, so that they can be compared.

SPEC is a TOML or JSON file; docs/scale.md describes it. A cell is one combination. Its images are cut into shards of --batch images;
a finished shard is never drawn again, so the same command goes on after an interruption, with other workers, or with more images.
Image i of every cell starts from the noise of (seed, i) and shows the same class or prompt. The table printed at the end depends on
the pictures alone: it is the same for every number of workers.

With RANK and WORLD_SIZE set, as torchrun does, a process takes its part of the images. With --ray they are distributed by Ray.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..assembly import AUTO, Source
from ..cli.options import models_folder, ranks, source, whole
from ..cli.progress import Bar
from ..errors import UserError
from ..model_loaders.checkpoint import DTYPES, INT8
from ..model_loaders.networks.speed import PLAIN
from ..reports.table import markdown
from .engines import Cluster, Task, connect, run_here, run_on_ray, tasks_of, unfinished
from .export import FORMATS, export
from .plan import manifest, plan
from .records import MOST_BATCH, MOST_IMAGES, Cell, Shard, ranges
from .records import whole as in_range
from .spec import LIMITS, Spec, read_spec, with_values
from .store import Store
from .times import disk, duration, estimates, time_cell
from .work import Conditions, Models, Worker, numerics, use

# Options that replace an entry of the spec.
_NUMBERS = {
    "images": (1, MOST_IMAGES),
    "batch": (1, MOST_BATCH),
    "seed": LIMITS["seed"],
    "threads": (1, LIMITS["threads"][1]),
}


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
        "folders)",
    )
    parser.add_argument("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument("--dtype", choices=(AUTO, *DTYPES, INT8), help="weights; default the spec's, or auto")
    parser.add_argument("--threads", metavar="N", help="threads of a worker on a CPU; default this process's")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="distribute the images with Ray: on the cluster at this address, or on this machine; needs fastar-nodes[scale]",
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
    tasks = _left(store, tasks_of(store, cells, rank, world))
    if cluster is None:
        _draw(tasks, run_here(Worker(store, models, conditions), tasks))
    else:
        own = replace(cluster, cpus=cluster.cpus or numbers["threads"] or 1)
        _draw(tasks, run_on_ray(store, spec, tasks, own, models_folder(options.models), numbers))
    if rank == 0:
        _finish(store, cells, spec, options.format)
    return 0


def _spec(options: argparse.Namespace) -> Spec:
    """The spec with the options in place of its entries."""
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    values: dict[str, Any] = {name: whole(text, name, *_NUMBERS[name]) for name, text in given.items()}
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
        raise UserError("ray: WORLD_SIZE is set too; distribute the images by one of them.")
    cluster = Cluster(options.ray, numbers.get("workers", 0), numbers.get("cpus", 0))
    ray = connect(cluster)
    gpus = options.device == AUTO and ray.cluster_resources().get("GPU", 0) >= 1
    return replace(cluster, gpu=gpus or options.device.startswith("cuda"))


def _files(options: argparse.Namespace, spec: Spec, local: int, cluster: Cluster | None) -> Source:
    """Where models are. Of several processes on a machine each takes a CUDA device of its own; with Ray this process only plans, on
    the CPU."""
    settings = argparse.Namespace(models=options.models, device=options.device, dtype=spec.dtype, speed=PLAIN)
    if cluster is not None:
        if cluster.gpu and spec.dtype == AUTO and not torch.cuda.is_available():
            raise UserError(
                "dtype: this machine has no GPU to choose it by; name the one of the workers, for example --dtype bf16."
            )
        settings.device = "cpu"
        return replace(source(settings), compute=torch.device("cuda" if cluster.gpu else "cpu"))
    if local and options.device == AUTO and torch.cuda.is_available():
        # A scheduler may show each process its own device only.
        settings.device = f"cuda:{local % torch.cuda.device_count()}"
    return source(settings)


def _numerics(spec: Spec, files: Source, store: Store | None, cluster: Cluster | None) -> dict[str, Any]:
    """See :func:`.work.numerics`; the threads are those of the folder's earlier run, or the CPUs of Ray's workers, unless the user names
    a number."""
    numbers = numerics(spec, files)
    if spec.threads or numbers["device"] != "cpu":
        return numbers
    if cluster is not None:
        numbers["threads"] = cluster.cpus or 1
    before = (store.manifest() if store is not None else None) or {}
    recorded = before.get("numerics")
    if isinstance(recorded, dict) and recorded.get("device") == "cpu":
        threads = recorded.get("threads")
        if not in_range(threads, *_NUMBERS["threads"]):
            raise UserError(
                f"threads: the folder's manifest names {str(threads)[:40]!r}; name a number with --threads."
            )
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


def _draw(tasks: Sequence[Task], drawn: Iterator[tuple[str, Shard]]) -> None:
    """Draw the tasks with a progress bar."""
    total, finished = _shards(tasks), 0
    with _terminated(), Bar("drawing") as bar:
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


def _finish(store: Store, cells: Sequence[Cell], spec: Spec, form: str | None) -> None:
    """Print the table; export where asked."""
    print(store.table())
    finished = [cell for cell in cells if len(store.shards(cell)) == len(store.ranges(cell))]
    if len(finished) < len(cells):
        print(f"{len(cells) - len(finished)} cells are not finished; other processes may be at work on them")
    if form:
        for cell in finished:
            print(f"written: {export(store, cell, form, spec.prompts)}")


def _dry_run(spec: Spec, models: Models, conditions: Conditions, numbers: dict[str, Any], store: Store | None) -> int:
    """Print what a sweep would cost; nothing is written."""
    seconds: dict[str, float] = {}

    def measure(cell: Cell, prepared: Any) -> None:
        seconds[cell.id] = time_cell(prepared, conditions, cell, spec.batch)

    cells = plan(spec, models, conditions, numbers, measure)
    print(markdown(estimates(cells, seconds, spec.batch)))
    shards, images = sum(-(-cell.images // spec.batch) for cell in cells), sum(cell.images for cell in cells)
    print(
        f"\n{len(cells)} cells, {shards} shards of at most {spec.batch} images, {images:,} images, "
        f"{sum(map(disk, cells)) / 1e6:,.0f} MB on disk; about "
        f"{duration(sum(seconds[cell.id] * cell.images for cell in cells))} with one worker like this machine."
    )
    if store is not None:
        done = sum(store.shard(cell, *part) is not None for cell in cells for part in ranges(cell.images, spec.batch))
        if done:
            print(f"{done} shards are finished already.")
    return 0
