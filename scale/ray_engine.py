"""The engine on Ray: a worker per GPU, or per a few CPUs, that keeps its model loaded. Ray is imported only here, and only when asked for.

The driver assigns shards. A worker takes all cells of a range of images, so that its times are paired, and one that has nothing left
takes single shards of the others. Each worker has two shards assigned, so that it never waits for the driver. The shards of a worker
that ends (killed, preempted, its node lost) are assigned again; after it ran out of memory, with a smaller batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..assembly import Source, find_file
from ..errors import UserError, first_line
from .claims import Claims
from .local import Done
from .spec import from_manifest
from .store import Shard, Store, stem
from .work import Conditions, Job, Models, Worker, use

# Shards assigned to a worker at once.
DEPTH = 2
# Times that a shard may end its worker before the sweep stops; after so many, memory is suspected. The system's own killer leaves no
# message.
MOST_ENDS, SUSPECT = 10, 5
# Seconds between two looks at workers, and at shards that other sweeps draw.
_LOOK = 1.0
# Seconds until a cluster counts as unreachable.
_REACHED = 10.0


@dataclass(frozen=True)
class Cluster:
    """What to use of a cluster.

    Attributes:
        address: of its head ("host:6379", "ray://host:10001"), or "" for the one of this machine, which is started if there is none.
        workers: their number; 0 for as many as the cluster has room for.
        cpus: CPUs of a worker.
        gpu: whether a worker takes a GPU.
    """

    address: str = ""
    workers: int = 0
    cpus: int = 1
    gpu: bool = False


class Drawer:
    """A worker in a process of Ray.

    Args:
        address: of the store.
        models: folder of weight files.
        numbers: see :func:`.work.numerics`.
    """

    def __init__(self, address: str, models: str, numbers: dict[str, Any]):
        store = Store(address)
        spec = from_manifest(store.manifest())
        folder = Path(models)
        source = Source(
            lambda choice, family: find_file(choice, family, folder), torch.device(numbers["device"]), spec.dtype
        )
        use(numbers)
        loaded = Models(spec, source)
        self.worker = Worker(store, loaded, Conditions(spec, loaded))

    def ready(self) -> str:
        """Name of the worker."""
        return self.worker.name

    def draw(self, job: Job) -> Shard:
        """See :meth:`.work.Worker.run_shard`."""
        return self.worker.run_shard(job)


def import_ray() -> Any:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            "ray: the package is not installed; run pip install 'fastar-nodes[scale]', or leave --ray out."
        ) from None
    return ray


def connect(cluster: Cluster) -> Any:
    """Connect to a cluster; returns the package.

    Raises:
        UserError: Ray is not installed, or no cluster answers at the address.
    """
    ray, address = import_ray(), cluster.address
    try:
        if ":" in address:  # Ray itself would wait for four minutes
            asyncio.run(_probe(address.removeprefix("ray://")))
        ray.init(address or None, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, asyncio.TimeoutError, OSError, SystemExit) as e:
        raise UserError(
            f"ray: no cluster answers at {address or 'this machine'} ({first_line(e)}); start one with ray start --head, or leave the "
            "address out."
        ) from None
    return ray


async def _probe(address: str) -> None:
    """Open a connection to a host and port, and close it.

    Raises:
        OSError, TimeoutError, ValueError: nothing listens there, or it is no address.
    """
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _REACHED)
    writer.close()


def has_gpus(ray: Any) -> bool:
    """Whether the cluster has GPUs."""
    return ray.cluster_resources().get("GPU", 0) >= 1


def run(
    store: Store,
    jobs: Sequence[Job],
    cluster: Cluster,
    models: Path,
    numbers: dict[str, Any],
    claims: Claims,
    done: Done,
) -> int:
    """Draw all jobs on a connected cluster. Returns when each is finished, by this sweep or by another one.

    Args:
        models: folder of weight files on the workers.
        numbers: see :func:`.work.numerics`.
        claims, done: see :func:`.local.run`.

    Returns:
        How many workers ended before their time.

    Raises:
        UserError: what a worker reports, or a shard that ended ten workers.
    """
    ray = import_ray()
    room = ray.cluster_resources()
    fits = room.get("GPU", 0) if cluster.gpu else room.get("CPU", 1) // cluster.cpus
    number = cluster.workers or max(1, int(fits))
    kind = ray.remote(num_cpus=cluster.cpus, num_gpus=int(cluster.gpu))(Drawer)
    address = store.folder.address if not store.folder.local else str(Path(store.folder.root).resolve())
    pool = _Pool(ray, lambda: kind.remote(address, str(models), numbers), number)
    driver = _Driver(store, jobs, claims, done, number)
    try:
        while driver.left:
            driver.assign(pool.workers)
            if not pool.wait(driver):
                driver.look()
    finally:
        pool.end()
    return pool.ended


@dataclass(eq=False)
class _Worker:
    """A process of Ray with what is assigned to it.

    Attributes:
        handle: the actor.
        starting: the call that returns once it runs; None from then on.
        calls: assigned calls with their jobs, oldest first.
        group: jobs of its range that are not assigned yet.
    """

    handle: Any
    starting: Any
    calls: dict[Any, Job] = field(default_factory=dict)
    group: deque[Job] = field(default_factory=deque)


class _Driver:
    """Which jobs are left, and who draws them."""

    def __init__(self, store: Store, jobs: Sequence[Job], claims: Claims, done: Done, workers: int):
        self.store, self.claims, self.done = store, claims, done
        self.left = len(jobs)
        self.waiting: deque[Job] = deque()  # of other sweeps
        self.groups: deque[deque[Job]] = deque()
        self.ends: dict[tuple[str, int], int] = {}
        for job in jobs:
            last = self.groups[-1][-1] if self.groups else None
            if last is None or (last.first, last.count) != (job.first, job.count):
                self.groups.append(deque())
            self.groups[-1].append(job)

    def assign(self, workers: Sequence[_Worker]) -> None:
        """Fill up the workers that run."""
        for depth in range(1, DEPTH + 1):
            for worker in workers:
                while worker.starting is None and len(worker.calls) < depth:
                    job = self._next(worker, workers)
                    if job is None:
                        break
                    worker.calls[worker.handle.draw.remote(job)] = job

    def _next(self, worker: _Worker, workers: Sequence[_Worker]) -> Job | None:
        """A job that is neither finished nor another sweep's; None if there is none now."""
        while True:
            if not worker.group and self.groups:
                worker.group = self.groups.popleft()
            if not worker.group:
                longest = max(workers, key=lambda w: len(w.group))
                if not longest.group:
                    return None
                worker.group.append(longest.group.pop())
            job = worker.group.popleft()
            if self._finished(job):
                self._done(job, None)
            elif self.claims.take(_name(job)):
                return job
            else:
                self.waiting.append(job)

    def look(self) -> None:
        """Look again at the shards of other sweeps."""
        for job in [self.waiting.popleft() for _ in range(len(self.waiting))]:
            if self._finished(job):
                self._done(job, None)
            else:
                self.groups.append(deque([job]))

    def finished(self, job: Job, shard: Shard) -> None:
        """A job of this sweep is finished."""
        self.claims.release(_name(job))
        self._done(job, shard)

    def lost(self, jobs: Sequence[Job], why: str, short: bool) -> None:
        """The worker of these jobs ended; the first was running.

        Args:
            why: Ray's message.
            short: whether Ray ended it because memory was short.

        Raises:
            UserError: the running shard has ended too many workers.
        """
        back = list(jobs)
        for job in back:
            self.claims.release(_name(job))
        if back:
            first = back[0]
            key = (first.cell, first.first)
            self.ends[key] = self.ends.get(key, 0) + 1
            if self.ends[key] >= MOST_ENDS:
                raise UserError(
                    f"ray: shard {first.first} of {first.cell} ended {MOST_ENDS} workers ({why}); draw it without --ray to see why."
                )
            # The message of every other end mentions memory as a possible cause.
            if short or self.ends[key] == SUSPECT:
                back[0] = replace(first, at_most=max(1, (first.at_most or first.count) // 2))
            self.groups.appendleft(deque(back))

    def _finished(self, job: Job) -> bool:
        return self.store.shard(self.store.cell(job.cell), job.first, job.count) is not None

    def _done(self, job: Job, shard: Shard | None) -> None:
        self.left -= 1
        self.done(job, shard)


class _Pool:
    """The workers. One that ends is replaced; Ray starts the new one when there is room for it."""

    def __init__(self, ray: Any, start: Any, number: int):
        self._ray, self._start = ray, start
        self.ended = 0
        self.workers = [self._new() for _ in range(number)]

    def _new(self) -> _Worker:
        handle = self._start()
        return _Worker(handle, handle.ready.remote())

    def wait(self, driver: _Driver) -> bool:
        """Wait for a call to end, at most a second; whether one did."""
        calls = {call: w for w in self.workers for call in ([w.starting] if w.starting is not None else w.calls)}
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=_LOOK) if calls else ([], [])
        if not calls:
            time.sleep(_LOOK)
        for call in ready:
            self._take(calls[call], call, driver)
        return bool(ready)

    def _take(self, worker: _Worker, call: Any, driver: _Driver) -> None:
        """The result of a call.

        Raises:
            UserError: what the worker reports.
        """
        errors = self._ray.exceptions
        try:
            found = self._ray.get(call)
        except errors.RayTaskError as e:
            if isinstance(e.cause, UserError):
                raise UserError(str(e.cause)) from None
            raise
        except (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as e:
            self.ended += 1
            if worker.starting is not None and self.ended > MOST_ENDS * len(self.workers):
                raise UserError(f"ray: workers end before they begin ({first_line(e)}); see Ray's logs.") from None
            self.workers[self.workers.index(worker)] = self._new()
            short = isinstance(e, errors.OutOfMemoryError) or "low on memory" in str(e)
            driver.lost([*worker.calls.values(), *worker.group], first_line(e), short)
            return
        if worker.starting is not None:
            worker.starting = None
        else:
            driver.finished(worker.calls.pop(call), found)

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            self._ray.kill(worker.handle)


def _name(job: Job) -> str:
    return f"{job.cell}-{stem(job.first, job.count)}"
