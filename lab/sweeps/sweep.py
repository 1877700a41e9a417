"""Draw many images of every combination of samplers and settings, to compare them, on any number of workers.

SPEC is a TOML or JSON file; docs/scale.md describes it. A cell is one combination. Its images are divided into shards
of --batch images. A finished shard is never drawn again, so the same command continues after an interruption, with
other workers, or with more images. Image i of every cell starts from the noise of (seed, i) and shows the same class or
prompt. The table printed at the end depends only on the images, not on the number of workers.

The file of a paper (lab/papers) holds several sweeps, which are drawn one after another, and the paper's figures,
which are printed beside ours.

If RANK and WORLD_SIZE are set, as by torchrun, the process draws its part of the images.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from .folder import Folder
from .paper_files import Paper
from .records import Cell, Shard, ranges
from .records import whole as in_range
from .spec import LIMITS, Spec, from_table, read_prompts, read_table, with_values
from .store import Store
from .table import read, table
from .tasks import Task, draw, tasks_of, unfinished
from .work import Conditions, Models, Worker, manifest, numerics, plan, use

# Options that replace an entry of the spec.
_NUMBERS = ("images", "batch", "seed", "threads")
# Columns of the table at the end, none of which depends on the machine.
_COLUMNS = ("images", "passes", "head-calls", "accepted")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument

    add("spec", metavar="SPEC", help="the sweep: a TOML or JSON file")
    add("--out", metavar="DIR", help="folder of the sweep")

    add("--images", metavar="N", help="images of every cell; default the spec's")
    add("--batch", metavar="N", help="images of a shard, sampled at once; default the spec's, or 50")
    add("--seed", metavar="N", help="seed of the noise; default the spec's, or 0")
    add("--prompts", metavar="FILE", help="a text file with one prompt a line; default the spec's")

    add("--dry-run", action="store_true", help="print cells, shards and disk; draw nothing")
    add("--png", action="store_true", help="also write a PNG file for every image")

    add("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")
    add("--dtype", choices=(AUTO, *ALL_DTYPES), help="precision of the weights; default the spec's, or auto")
    add("--threads", metavar="N", help="threads of a worker on a CPU; default this process's")

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
        raise UserError(
            f"RANK: {given} are not possible, because all three must be whole numbers and RANK must be below "
            "WORLD_SIZE; set these variables as torchrun does, or unset them."
        )

    return rank, world, local


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    rank, world, local = _ranks()
    paper, specs = _specs(options)
    if not options.out and not options.dry_run:
        raise UserError("out: no folder is given; give --out DIR, or --dry-run to see which cells would be generated.")

    place = Place(rank, world, local)
    folder = Folder(options.out) if options.out else None
    if paper is not None and folder is not None and not options.dry_run:
        folder.check("out")
        paper_files.keep(folder, paper)

    for name, spec in specs.items():
        if name and rank == 0:
            print(f"\n{name}\n", flush=True)

        _run(options, spec, folder and folder.path / name, place)

    if paper is not None and folder is not None and rank == 0 and not options.dry_run:
        print(f"\n{paper_files.comparison(paper, paper_files.stores(folder, paper))}")
    return 0


@dataclass(frozen=True)
class Place:
    """Where this process draws."""

    rank: int
    world: int  # number of processes
    local: int  # rank on this machine


def _run(options: argparse.Namespace, spec: Spec, out: Path | None, place: Place) -> None:
    """Draw a sweep to the folder ``out``, or print what it would cost."""
    files = _files(options, spec, place.local if place.world > 1 else 0)
    store = Store(out) if out else None
    numbers = _numerics(spec, files, store)
    use(numbers)

    if store is None or options.dry_run:
        try:
            models = Models(spec, here_only(files, models_folder(options.models)))
            _dry_run(spec, models, Conditions(spec, models), numbers, store)
        except NotHere as missing:
            print(by_shapes(spec, files))
            print(f"\n{missing} No file is checked.")
        return

    models = Models(spec, files)
    conditions = Conditions(spec, models)

    try:
        store.folder.check("out")
        cells = plan(spec, models, conditions, numbers)
    except UserError:
        store.folder.remove_made()
        raise

    if place.rank == 0 and store.manifest() is None:
        print(f"a new sweep begins in {store.folder.path}", file=sys.stderr)
    store.write_manifest(manifest(spec, numbers), cells)
    tasks = _left(store, tasks_of(store, cells, place.rank, place.world))

    _draw(tasks, draw(Worker(store, models, conditions), tasks))

    if place.rank == 0:
        _finish(store, cells, options.png)


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
    entries = read_table(path)

    paper = None
    specs: Mapping[str, Spec]
    if paper_files.is_paper(entries):
        paper = paper_files.paper_of(entries)
        specs = paper.sweeps
    else:
        specs = {"": from_table(entries)}

    if options.prompts is not None:
        values["prompts"] = read_prompts(typed_path(options.prompts, "prompts"))

    changed = {name: with_values(spec, **values) for name, spec in specs.items()}
    if not all(spec.images for spec in changed.values()):
        raise UserError("images: the spec does not say how many images to generate; set the number with --images.")

    return paper, changed


def _files(options: argparse.Namespace, spec: Spec, local: int) -> Source:
    """Where models are. Each process of a machine takes a CUDA device of its own."""
    settings = argparse.Namespace(models=options.models, device=options.device, dtype=spec.dtype, speed=PLAIN)

    if local and options.device == AUTO and torch.cuda.is_available():
        # A scheduler may show each process its own device only.
        settings.device = f"cuda:{local % torch.cuda.device_count()}"

    return source(settings)


def _numerics(spec: Spec, files: Source, store: Store | None) -> dict[str, Any]:
    """See :func:`.work.numerics`; the threads are the named number, else that of the folder's earlier run."""
    numbers = numerics(spec, files)
    if spec.threads or numbers["device"] != "cpu":
        return numbers

    before = store.manifest() if store is not None else None
    recorded = before.get("numerics") if before else None
    if isinstance(recorded, dict) and recorded.get("device") == "cpu":
        threads = recorded.get("threads")
        if not in_range(threads, 1, LIMITS["threads"][1]):
            raise UserError(
                f"threads: {str(threads)[:40]!r} in the folder's manifest is not a number of threads; give --threads."
            )
        numbers["threads"] = threads

    return numbers


def _left(store: Store, tasks: Sequence[Task]) -> list[Task]:
    """The tasks that are not finished; prints how many shards are."""
    left, damaged = unfinished(store, tasks)
    if damaged:
        print(f"{amount(damaged, 'shards')} did not match the record and will be generated again", file=sys.stderr)

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
                f"\n{finished} of {total} shards were finished in this run; run the same command again to continue",
                file=sys.stderr,
            )
            raise


def _finish(store: Store, cells: Sequence[Cell], png: bool) -> None:
    """Print the table; export the images."""
    print(table([read(store)], _COLUMNS))

    finished = [cell for cell in cells if len(store.shards(cell)) == len(store.ranges(cell))]
    if len(finished) < len(cells):
        print(f"{len(cells) - len(finished)} cells are not finished; other processes may be at work on them")

    if png:
        for cell in finished:
            print(f"written: {export(store, cell)}")


def export(store: Store, cell: Cell) -> str:
    """Write all images of a cell below the folder ``export`` of the sweep; returns the folder."""
    name = f"export/{cell.id}"

    for shard in store.shards(cell):
        for index, picture in enumerate(store.pictures(cell, shard), shard.first):
            out = io.BytesIO()
            Image.fromarray(picture).save(out, "PNG", compress_level=4)
            store.folder.write(f"{name}/{index:07d}.png", out.getvalue())

    return name


def _dry_run(spec: Spec, models: Models, conditions: Conditions, numbers: dict[str, Any], store: Store | None) -> None:
    """Print what a sweep would draw; nothing is written."""
    cells = plan(spec, models, conditions, numbers)
    rows = [["cell", "model", "images", "shards", "MB"]]
    for cell in cells:
        height, width = cell.size
        megabytes = f"{cell.images * height * width * 3 / 1e6:,.0f}"
        rows.append([cell.id, cell.model, str(cell.images), str(len(ranges(cell.images, spec.batch))), megabytes])
    print(markdown(rows))

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
