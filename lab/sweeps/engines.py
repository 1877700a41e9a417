"""Drawing a sweep: in this process, or on Ray.

A task is a range of images over all cells of one model, so that the cells of a range are drawn by one worker, one after
the other, and their times are paired. A shard that exists is not drawn again, and a repetition of one writes the same
bytes: a task that is interrupted, or repeated by another worker, loses only the shard in progress.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError, first_line
from ...runs.loading import Source, find_file
from .records import Cell, Shard
from .spec import Spec
from .store import Store
from .work import Models, Worker, use

# Seconds until a cluster counts as unreachable.
_REACHED = 10.0
# Times that a task is repeated after its worker ended.
RETRIES = 3


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


def run_task(worker: Worker, task: Task) -> Iterator[tuple[str, Shard]]:
    """Draw the cells of a task that no other process has finished by then; yields the id of each and its shard."""
    for name in task.cells:
        cell = worker.store.cell(name)
        shard = worker.store.shard(cell, task.first, task.count)
        yield name, shard or worker.run_shard(cell, task.first, task.count)


def run_here(worker: Worker, tasks: Sequence[Task]) -> Iterator[tuple[str, Shard]]:
    """Draw all tasks in this process; yields as :func:`run_task`."""
    for task in tasks:
        yield from run_task(worker, task)


@dataclass(frozen=True)
class Cluster:
    """What to use of a cluster."""

    address: str = ""  # of its head ("host:6379", "ray://host:10001"); "" for this machine's, started if needed
    workers: int = 0  # 0 for as many as the cluster has room for
    cpus: int = 1  # of a worker
    gpu: bool = False  # whether a worker takes a GPU


class Drawer:
    """A worker in a process of Ray, which keeps its model loaded."""

    def __init__(self, folder: str, spec: Spec, models: Path | None, numbers: dict[str, Any]):
        self.folder = folder
        self.spec = spec
        self.models = models  # folder of weight files, None if there is none
        self.numbers = numbers
        self.worker: Worker | None = None

    def run(self, task: Task) -> list[tuple[str, Shard]]:
        """See :func:`run_task`.

        The first task makes the worker: Ray would not report an error of ``__init__`` as such.
        """
        if self.worker is None:
            use(self.numbers)
            device = torch.device(self.numbers["device"])
            source = Source(lambda choice, family: find_file(choice, family, self.models), device, self.spec.dtype)
            self.worker = Worker(Store(self.folder), Models(self.spec, source))

        return list(run_task(self.worker, task))


def import_ray() -> Any:
    """The package."""
    try:
        import ray
    except ImportError:
        raise UserError("ray: it is not installed; run pip install 'fastar-nodes[scale]', or omit --ray.") from None

    return ray


def connect(cluster: Cluster) -> Any:
    """Connect to a cluster; returns the package."""
    ray = import_ray()
    address = cluster.address

    try:
        if ":" in address:  # Ray itself would wait for four minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), _REACHED).close()

        ray.init(address or None, log_to_driver=False)
    except (Exception, SystemExit) as e:  # Ray raises Exception itself where a node does not start in time
        at = address or "this machine"
        raise UserError(f"ray: no cluster was found at {at} ({first_line(e)}); run ray start --head there.") from None

    return ray


def run_on_ray(
    store: Store, spec: Spec, tasks: Sequence[Task], cluster: Cluster, models: Path | None, numbers: dict[str, Any]
) -> Iterator[tuple[str, Shard]]:
    """Draw all tasks on a connected cluster; yields as :func:`run_task`."""
    ray = import_ray()
    from ray.util import ActorPool

    # As many workers as asked or as fit, but not more than tasks.
    room = ray.cluster_resources()
    if cluster.gpu:
        fits = room.get("GPU", 0)
    else:
        fits = room.get("CPU", 1) // cluster.cpus
    count = min(cluster.workers or max(1, int(fits)), max(1, len(tasks)))

    kind = ray.remote(max_restarts=-1, max_task_retries=RETRIES, num_cpus=cluster.cpus, num_gpus=int(cluster.gpu))(
        Drawer
    )
    workers = [kind.remote(str(store.folder.path), spec, models, numbers) for _ in range(count)]

    try:
        for found in ActorPool(workers).map_unordered(lambda worker, task: worker.run.remote(task), list(tasks)):
            yield from found
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, UserError):
            raise UserError(str(e.cause)) from None
        raise
    except ray.exceptions.RayError as e:
        raise UserError(
            f"ray: a task failed {RETRIES + 1} times, or the cluster was lost ({first_line(e)}); "
            "run the same command again, or without --ray to see why."
        ) from None
    finally:
        for worker in workers:
            ray.kill(worker)
