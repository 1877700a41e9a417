"""The engine of one process: shards one after another, shared with other processes on the same folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .claims import Claims
from .store import Cell, Shard, Store, stem
from .work import Job, Progress, Worker

# Seconds between two looks at shards that other processes draw.
_LOOK = 1.0

# Called with a finished shard; None for one that another process drew.
Done = Callable[[Job, Shard | None], None]


def jobs_of(store: Store, cells: Sequence[Cell], rank: int = 0, world: int = 1) -> list[Job]:
    """All shards of a sweep, finished or not: by model, then by range, then by cell.

    Cells of one range follow each other, so that their times are paired, and an interrupted sweep has as many images of every cell.

    Args:
        rank, world: of a static split; every process takes whole ranges where there are enough of them.
    """
    out = []
    models = dict.fromkeys((cell.family, cell.model) for cell in cells)
    for model in models:
        own = [cell for cell in cells if (cell.family, cell.model) == model]
        parts = list(dict.fromkeys(r for cell in own for r in store.ranges(cell)))
        for i, (first, count) in enumerate(parts):
            for k, cell in enumerate(own):
                number = i if len(parts) >= world else i * len(own) + k
                if number % world == rank:
                    out.append(Job(cell.id, first, count))
    return out


def unfinished(
    store: Store, jobs: Sequence[Job], whole: bool = True, progress: Progress | None = None
) -> tuple[list[Job], int]:
    """The jobs without a finished shard, and how many shards were damaged. The record of a damaged shard is removed.

    Args:
        whole: compare the pictures with their digest, not only the size of their file.
    """
    damaged, checked = 0, 0
    by_cell: dict[str, list[Job]] = {}
    for job in jobs:
        by_cell.setdefault(job.cell, []).append(job)
    missing: set[Job] = set()
    for name, own in by_cell.items():
        cell = store.cell(name)
        shards, sizes = {(s.first, s.count): s for s in store.shards(cell)}, store.sizes(cell)
        for job in own:
            shard = shards.get((job.first, job.count))
            if shard is None:
                missing.add(job)
            elif sizes.get(f"{shard.stem}.npz") != shard.bytes or whole and not store.complete(cell, shard):
                damaged += 1
                store.discard(cell, job.first, job.count)
                missing.add(job)
            checked += 1
            if progress is not None:
                progress(checked, len(jobs))
    return [job for job in jobs if job in missing], damaged


def run(
    store: Store, jobs: Sequence[Job], worker: Worker, claims: Claims, done: Done, progress: Progress | None = None
) -> int:
    """Draw all jobs. Returns when each is finished, by this process or by another one.

    Args:
        claims: entered.
        done: called after each job.
        progress: called with the steps of the running shard.

    Returns:
        0, as no worker ends before its time.
    """
    left = list(jobs)
    while left:
        waiting = []
        for job in left:
            cell, name = store.cell(job.cell), f"{job.cell}-{stem(job.first, job.count)}"
            if store.shard(cell, job.first, job.count) is not None:
                done(job, None)
            elif not claims.take(name):
                waiting.append(job)
            else:
                try:
                    # It may have been finished between the two lines above.
                    found = store.shard(cell, job.first, job.count)
                    done(job, None if found is not None else worker.run_shard(job, progress))
                finally:
                    claims.release(name)
        if len(waiting) == len(left):
            time.sleep(_LOOK)
        left = waiting
    return 0
