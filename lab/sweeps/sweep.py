"""Draw many images of every combination of samplers and settings, to compare them, on any number of workers.

SPEC is a TOML or JSON file; docs/scale.md describes it. A cell is one combination. Its images are divided into shards
of --batch images. A finished shard is never drawn again, so the same command continues after an interruption, with
other workers, or with more images. Image i of every cell starts from the noise of (seed, i) and shows the same class or
prompt. The table printed at the end depends only on the images, not on the number of workers.

The file of a paper (lab/papers) holds several sweeps, which are drawn one after another, and the paper's figures,
which are printed beside ours.

If RANK and WORLD_SIZE are set, as by torchrun, the process draws its part of the images. With --ray, Ray distributes
them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from ...cli.options import models_folder, models_option, source, whole
from ...cli.progress import Bar
from ...errors import UserError, amount
from ...model_loaders.kinds import ALL_DTYPES
from ...networks.speed import PLAIN
from ...reports.files import typed_path
from ...reports.table import markdown
from ...runs.loading import AUTO, Source
from . import paper_files
from .dry_run import NotHere, by_shapes, here_only
from .engines import Cluster, Task, connect, run_here, run_on_ray, tasks_of, unfinished
from .folder import Folder
from .paper_files import Paper
from .records import ID, Cell, Shard, ranges
from .records import whole as in_range
from .spec import DPG, HPS, LIMITS, NUMBER, Spec, from_table, read_prompts, read_table, with_values
from .store import Store
from .work import Conditions, Models, Prepared, Worker, draw, manifest, numerics, plan, use

# Options that replace an entry of the spec.
_NUMBERS = ("images", "batch", "seed", "threads")
# Images of a cell that are timed on a CPU; on other devices a whole batch, on which their speed depends.
CPU_IMAGES = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument

    add("spec", metavar="SPEC", help="the sweep: a TOML or JSON file")
    add("--out", metavar="DIR", help="folder of the sweep, or an address such as s3://bucket/sweep")

    add("--images", metavar="N", help="images of every cell; default the spec's")
    add("--batch", metavar="N", help="images of a shard, sampled at once; default the spec's, or 50")
    add("--seed", metavar="N", help="seed of the noise; default the spec's, or 0")
    add(
        "--prompts",
        metavar="FILE",
        help="a text file with one prompt a line, JSON Lines, or the folder of a benchmark; default the spec's",
    )

    add("--dry-run", action="store_true", help="print cells, shards, time and disk; draw nothing")
    add(
        "--png",
        action="store_true",
        help="also write image files, with prompts in the folders of GenEval, DPG-Bench or HPSv2",
    )

    add("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")
    add("--dtype", choices=(AUTO, *ALL_DTYPES), help="precision of the weights; default the spec's, or auto")
    add("--threads", metavar="N", help="threads of a worker on a CPU; default this process's")

    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="distribute the images with Ray, on the cluster at this address or on this machine",
    )
    add("--workers", metavar="N", help="with --ray: workers; default as many as there is room for now")
    add("--cpus", metavar="N", help="with --ray: CPUs of a worker; default threads, 1 beside a GPU")

    models_option(parser)


def _ranks() -> tuple[int, int, int]:
    """(RANK, WORLD_SIZE, LOCAL_RANK) of this process, as torchrun sets them; (0, 1, 0) without them."""
    texts = {
        "RANK": os.environ.get("RANK", "0"),
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
    }

    numbers = []
    for text in texts.values():
        numbers.append(int(text) if text.isdecimal() and len(text) <= 6 else -1)

    rank, world, local = numbers
    if not 0 <= rank < world or local < 0:
        given = ", ".join(f"{name} {text[:20]!r}" for name, text in texts.items())
        raise UserError(f"RANK: {given} are not a rank and a larger number; set them as torchrun does, or unset them.")

    return rank, world, local


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    rank, world, local = _ranks()
    paper, specs = _specs(options)
    if not options.out and not options.dry_run:
        raise UserError("out: no folder is named; give --out DIR, or --dry-run to see what would be drawn.")

    place = Place(rank, world, local, _cluster(options, world))
    folder = Folder(options.out) if options.out else None
    if paper is not None and folder is not None and not options.dry_run:
        folder.check("out")
        paper_files.keep(folder, paper)

    for name, spec in specs.items():
        if name and rank == 0:
            print(f"\n{name}\n", flush=True)

        out = options.out
        if name and out:
            out = paper_files.place(out, name)
        _run(options, spec, out, place)

    if paper is not None and folder is not None and rank == 0 and not options.dry_run:
        print(f"\n{paper_files.comparison(paper, paper_files.stores(folder, paper))}")
    return 0


@dataclass(frozen=True)
class Place:
    """Where this process draws."""

    rank: int
    world: int  # number of processes
    local: int  # rank on this machine
    cluster: Cluster | None  # None without --ray


def _run(options: argparse.Namespace, spec: Spec, out: str | None, place: Place) -> None:
    """Draw a sweep to the folder ``out``, or print what it would cost."""
    cluster = place.cluster
    files = _files(options, spec, place.local if place.world > 1 else 0, cluster)
    store = Store(out) if out else None
    numbers = _numerics(spec, files, store, cluster)
    use(numbers)

    if store is None or options.dry_run:
        try:
            models = Models(spec, here_only(files, models_folder(options.models)))
            _dry_run(spec, models, Conditions(spec, models), numbers, store)
        except NotHere as missing:
            print(by_shapes(spec, files))
            print(f"\n{missing} Time is not estimated, and no file is checked.")
        return

    models = Models(spec, files)
    conditions = Conditions(spec, models)

    try:
        # What is asked, compared with what the folder holds, before a model is loaded.
        store.folder.check("out")
        store.expect_same(manifest(spec, numbers))

        cells = store.named(plan(spec, models, conditions, numbers))
    except UserError:
        store.folder.remove_made()
        raise

    if place.rank == 0 and store.manifest() is None:
        print(f"a new sweep begins in {store.folder.address}", file=sys.stderr)
    store.write_manifest(manifest(spec, numbers), cells)
    tasks = _left(store, tasks_of(store, cells, place.rank, place.world))

    if cluster is None:
        _draw(tasks, run_here(Worker(store, models, conditions), tasks))
    else:
        own = replace(cluster, cpus=cluster.cpus or numbers["threads"] or 1)
        _draw(tasks, run_on_ray(store, spec, tasks, own, models_folder(options.models), numbers))

    if place.rank == 0:
        _finish(store, cells, spec if options.png else None)


def _specs(options: argparse.Namespace) -> tuple[Paper | None, dict[str, Spec]]:
    """The sweeps of the file by name, with the options in place of their entries, and the paper that they are of.

    A spec that is no paper's has the name "".
    """
    values: dict[str, Any] = {"dtype": options.dtype}
    for name in _NUMBERS:
        text = getattr(options, name)
        if text is not None:
            low, high = LIMITS[name]
            values[name] = whole(text, name, low, high)

    path = typed_path(options.spec, "spec")
    table = read_table(path)

    paper = None
    specs: Mapping[str, Spec]
    if paper_files.is_paper(table):
        paper = paper_files.paper_of(table)
        specs = paper.sweeps
    else:
        specs = {"": from_table(table)}

    if options.prompts is not None:
        values["prompts"] = read_prompts(typed_path(options.prompts, "prompts"))

    changed = {name: with_values(spec, **values) for name, spec in specs.items()}
    if not all(spec.images for spec in changed.values()):
        raise UserError("images: the spec names no number of images; give --images.")

    return paper, changed


def _cluster(options: argparse.Namespace, world: int) -> Cluster | None:
    """The cluster of --ray, connected; None without it."""
    numbers = {}
    for name in ("workers", "cpus"):
        text = getattr(options, name)
        if text:
            numbers[name] = whole(text, name, 1, 65536)

    if options.ray is None:
        if numbers:
            raise UserError(f"{next(iter(numbers))}: it is for --ray; add that, or leave it out.")
        return None

    if world > 1:
        raise UserError("ray: WORLD_SIZE is set too; distribute the images by one of them.")

    cluster = Cluster(options.ray, numbers.get("workers", 0), numbers.get("cpus", 0))
    ray = connect(cluster)
    has_gpus = options.device == AUTO and ray.cluster_resources().get("GPU", 0) >= 1

    return replace(cluster, gpu=has_gpus or options.device.startswith("cuda"))


def _files(options: argparse.Namespace, spec: Spec, local: int, cluster: Cluster | None) -> Source:
    """Where models are.

    Each process of a machine takes a CUDA device of its own; with Ray this one only plans, on the CPU.
    """
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
    """See :func:`.work.numerics`.

    The threads are the named number, else that of the folder's earlier run, else Ray's CPUs.
    """
    numbers = numerics(spec, files)
    if spec.threads or numbers["device"] != "cpu":
        return numbers

    if cluster is not None:
        numbers["threads"] = cluster.cpus or 1

    before = store.manifest() if store is not None else None
    recorded = before.get("numerics") if before else None
    if isinstance(recorded, dict) and recorded.get("device") == "cpu":
        threads = recorded.get("threads")
        if not in_range(threads, 1, LIMITS["threads"][1]):
            raise UserError(f"threads: the folder's manifest names {str(threads)[:40]!r}; give --threads.")
        numbers["threads"] = threads

    return numbers


def _left(store: Store, tasks: Sequence[Task]) -> list[Task]:
    """The tasks that are not finished; prints how many shards are. Images are read again only of a local folder."""
    left, damaged = unfinished(store, tasks, whole=store.folder.local)
    if damaged:
        print(f"{amount(damaged, 'shards')} did not match the record and will be drawn again", file=sys.stderr)

    every = _shards(tasks)
    finished = every - _shards(left)
    if finished > 0:
        print(f"{finished} of {every} shards are finished already", file=sys.stderr)

    return left


def _shards(tasks: Sequence[Task]) -> int:
    """Number of shards of tasks."""
    return sum(len(task.cells) for task in tasks)


def _draw(tasks: Sequence[Task], drawn: Iterator[tuple[str, Shard]]) -> None:
    """Draw the tasks with a progress bar."""
    total = _shards(tasks)
    finished = 0

    with Bar("drawing") as bar:
        try:
            for cell, shard in drawn:
                finished += 1
                bar(finished, total, "shards")
                if shard.note:
                    print(f"{cell}, image {shard.first} on: {shard.note}", file=sys.stderr)
        except KeyboardInterrupt:
            print(
                f"\n{finished} of {total} shards were finished in this run; the same command goes on from there",
                file=sys.stderr,
            )
            raise


def _finish(store: Store, cells: Sequence[Cell], exported: Spec | None) -> None:
    """Print the table; export the images with the prompts of a spec."""
    print(store.table())

    finished = [cell for cell in cells if len(store.shards(cell)) == len(store.ranges(cell))]
    if len(finished) < len(cells):
        print(f"{len(cells) - len(finished)} cells are not finished; other processes may be at work on them")

    if exported is not None:
        for cell in finished:
            print(f"written: {export(store, cell, exported.prompts)}")


def export(store: Store, cell: Cell, prompts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write all images of a cell below the folder ``export`` of the sweep; returns the folder."""
    name = f"export/{cell.id}"

    for i, about in enumerate(prompts):
        if DPG not in about and HPS not in about:
            store.folder.write(f"{name}/{i:05d}/metadata.jsonl", json.dumps(about, ensure_ascii=False).encode())

    for shard in store.shards(cell):
        for index, picture in enumerate(store.pictures(cell, shard), shard.first):
            path = image_path(index, prompts)
            out = io.BytesIO()
            if path.endswith(".jpg"):
                Image.fromarray(picture).save(out, "JPEG", quality=95)
            else:
                Image.fromarray(picture).save(out, "PNG", compress_level=4)
            store.folder.write(f"{name}/{path}", out.getvalue())

    return name


def image_path(index: int, prompts: Sequence[Mapping[str, Any]]) -> str:
    """Where the tool of a benchmark looks for image ``index``, whose prompt is that modulo their number.

    GenEval's evaluate_images.py reads all images of a prompt in a folder whose name is a number. DPG-Bench's
    compute_dpg_bench.py, with --pic-num 1, finds the questions by the name of the prompt's file, and HPSv2's
    evaluation.py opens a JPEG file by the number of the prompt in its style: every round of the prompts is a folder.
    """
    if not prompts:
        return f"{index:07d}.png"

    repeat, prompt = divmod(index, len(prompts))
    about = prompts[prompt]
    if DPG not in about and HPS not in about:
        return f"{prompt:05d}/samples/{repeat:05d}.png"

    name = str(about.get(DPG, about.get(HPS)))
    if not ID.fullmatch(name):
        raise UserError(f"prompts: {name[:60]!r} cannot be the name of a file; write letters, digits and dashes.")
    if DPG in about:
        return f"{repeat:05d}/{name}.png"

    number = whole(str(about.get(NUMBER)), NUMBER, 0, 99_999)
    return f"{repeat:05d}/{name}/{number:05d}.jpg"


def _dry_run(spec: Spec, models: Models, conditions: Conditions, numbers: dict[str, Any], store: Store | None) -> None:
    """Print what a sweep would cost; nothing is written."""
    seconds: dict[str, float] = {}

    def measure(cell: Cell, prepared: Any) -> None:
        seconds[cell.id] = time_cell(prepared, conditions, cell, spec.batch)

    cells = plan(spec, models, conditions, numbers, measure)
    print(markdown(estimates(cells, seconds, spec.batch)))

    shards = sum(math.ceil(cell.images / spec.batch) for cell in cells)
    images = sum(cell.images for cell in cells)
    megabytes = sum(disk(cell) for cell in cells) / 1e6
    total = duration(sum(seconds[cell.id] * cell.images for cell in cells))
    print(
        f"\n{len(cells)} cells, {shards} shards of at most {spec.batch} images, {images:,} images, "
        f"{megabytes:,.0f} MB on disk; about {total} with one worker like this machine."
    )

    if store is not None:
        done = _finished(store, cells, spec.batch)
        if done:
            print(f"{done} shards are finished already.")


def _finished(store: Store, cells: Sequence[Cell], batch: int) -> int:
    """Number of finished shards of cells."""
    done = 0
    for cell in cells:
        for first, count in ranges(cell.images, batch):
            if store.shard(cell, first, count) is not None:
                done += 1

    return done


def time_cell(prepared: Prepared, conditions: Conditions, cell: Cell, batch: int) -> float:
    """Seconds per image of a short run, sampler and decoder, after a shorter one that is not timed."""
    count = min(batch, cell.images)
    if prepared.ready.device.type == "cpu":
        count = min(count, CPU_IMAGES)

    condition, _ = conditions.of(prepared.ready, 0, count, cell.asked)
    draw(prepared, condition.of(range(1)), cell.seed, 0)

    began = time.perf_counter()
    draw(prepared, condition, cell.seed, 0)
    return (time.perf_counter() - began) / count


def duration(seconds: float) -> str:
    """A duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"

    return f"{seconds / 3600:.1f} h"


def estimates(cells: Sequence[Cell], seconds: Mapping[str, float], batch: int) -> list[list[str]]:
    """Rows of a table: shards, seconds, speed-up and disk of every cell, from its seconds per image by id."""
    rows = [["cell", "shards", "s / image", "time", "speed-up", "MB"]]

    for cell in cells:
        own = seconds[cell.id]
        base = seconds.get(cell.baseline or "")
        row = [
            cell.id,
            str(math.ceil(cell.images / batch)),
            f"{own:.3f}",
            duration(own * cell.images),
            "" if base is None else f"{base / own:.2f}x",
            f"{disk(cell) / 1e6:,.0f}",
        ]
        rows.append(row)

    return rows


def disk(cell: Cell) -> int:
    """Bytes of all images of a cell."""
    height, width = cell.size
    return cell.images * height * width * 3
