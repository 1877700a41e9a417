"""The tasks of a sweep.

A task is a range of images over all cells of one model, so that the cells of a range are drawn by one worker, one after
the other, and their times are paired. A shard that exists is not drawn again, and a repetition of one writes the same
bytes: a task that is interrupted, or repeated by another worker, loses only the shard in progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .records import Cell, Shard
from .store import Store
from .work import Worker


@dataclass(frozen=True)
class Task:
    """A range of images, and the ids of the cells that lack it, all on one model."""

    first: int
    count: int
    cells: tuple[str, ...]


def tasks_of(store: Store, cells: Sequence[Cell], rank: int = 0, world: int = 1) -> list[Task]:
    """All tasks of a sweep, by model and then by range, whether finished or not."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.family, cell.model), []).append(cell)

    tasks = []
    for group in groups.values():
        ids = tuple(cell.id for cell in group)
        for first, count in store.ranges(group[0]):
            tasks.append(Task(first, count, ids))

    return tasks[rank::world]


def unfinished(store: Store, tasks: Sequence[Task]) -> tuple[list[Task], int]:
    """The tasks with the cells that lack a finished shard, and how many shards were damaged.

    Records of damaged shards are removed.
    """
    tasks_by_cell: dict[str, list[Task]] = {}
    for task in tasks:
        for name in task.cells:
            tasks_by_cell.setdefault(name, []).append(task)

    # (cell, first image) of the shards that are to be drawn.
    missing: set[tuple[str, int]] = set()
    damaged = 0
    for name, wanted in tasks_by_cell.items():
        cell = store.cell(name)
        sizes = store.folder.sizes(f"cells/{cell.id}")
        shards = {(shard.first, shard.count): shard for shard in store.shards(cell)}

        for task in wanted:
            shard = shards.get((task.first, task.count))
            if shard is None:
                missing.add((name, task.first))
            elif sizes.get(f"{shard.stem}.npz") != shard.bytes or not store.complete(cell, shard):
                store.discard(cell, task.first, task.count)
                missing.add((name, task.first))
                damaged += 1

    left = []
    for task in tasks:
        names = tuple(name for name in task.cells if (name, task.first) in missing)
        if names:
            left.append(Task(task.first, task.count, names))

    return left, damaged


def draw(worker: Worker, tasks: Sequence[Task]) -> Iterator[tuple[str, Shard]]:
    """Draw the cells of tasks that no other process has finished by then; yields the id of each and its shard."""
    for task in tasks:
        for name in task.cells:
            cell = worker.store.cell(name)
            shard = worker.store.shard(cell, task.first, task.count)
            yield name, shard or worker.run_shard(cell, task.first, task.count)
