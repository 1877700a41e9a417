"""Simulate a sweep on many preemptible workers: ``python -m fastar_nodes.tools.scheduling DIR``.

The scheduler is the real one, ``scale/ray_engine.py``; the cluster is simulated, with a clock of its own. A shard takes the recorded
seconds of a shard of its cell in DIR, chosen at random and multiplied by a factor. A worker needs some seconds to begin, ends after an
exponentially distributed time, and is replaced by another machine after a while.

Utilisation is the seconds of finished shards over the seconds in which workers existed: beginning, lost shards, waiting for the scheduler
and for the last shards of the sweep are losses.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ..errors import UserError
from ..scale import ray_engine
from ..scale.local import jobs_of
from ..scale.store import Cell, Shard, Store, ranges
from ..scale.work import Job

HOUR = 3600.0


@dataclass(frozen=True)
class Conditions:
    """What the simulation assumes.

    Attributes:
        workers: number of machines.
        preempted: share of them that is preempted within an hour.
        begin: seconds from a machine to a worker with its model loaded.
        away: seconds until a preempted machine is replaced.
        factor: of recorded seconds.
        seed: of all random choices.
    """

    workers: int = 64
    preempted: float = 0.05
    begin: float = 60.0
    away: float = 120.0
    factor: float = 1.0
    seed: int = 0


@dataclass
class Outcome:
    """What happened.

    Attributes:
        seconds: from begin to end of the sweep.
        existed: seconds in which workers existed, over all workers.
        useful: seconds of finished shards.
        lost: seconds of shards that were cut off.
        begun, finished, cut_off: numbers of shards; ``begun`` counts repetitions.
        preemptions: machines that were preempted before the end.
        twice: shards that were finished more than once.
        scheduler: processor seconds of the scheduler and the simulation.
    """

    seconds: float = 0.0
    existed: float = 0.0
    useful: float = 0.0
    lost: float = 0.0
    begun: int = 0
    finished: int = 0
    cut_off: int = 0
    preemptions: int = 0
    twice: int = 0
    scheduler: float = 0.0

    @property
    def utilisation(self) -> float:
        """Useful seconds over the seconds in which workers existed."""
        return self.useful / self.existed if self.existed else 0.0

    def lines(self) -> list[str]:
        """The outcome as text."""
        return [
            f"{self.finished} shards in {self.seconds / HOUR:.2f} h; {self.preemptions} machines were preempted",
            f"utilisation {100 * self.utilisation:.1f} %: {self.useful / HOUR:.1f} h of finished shards, {self.existed / HOUR:.1f} h of "
            "machines",
            f"{self.cut_off} shards were cut off, {self.lost:.0f} s or {self.lost / max(self.useful, 1e-9):.4%} of the work",
            f"{self.begun - self.finished} shards were drawn again, {self.twice} were finished twice",
            f"scheduler and simulation: {1000 * self.scheduler / max(self.finished, 1):.2f} ms of one processor a shard",
        ]


class Preempted(Exception):
    """What Ray raises for the calls of a worker that ended."""


@dataclass(eq=False)
class _Call:
    """A call of a worker: when it ends, and whether it fails then."""

    end: float
    fails: bool
    job: Job | None = None


class _Actor:
    """A simulated worker. Its calls run one after another."""

    def __init__(self, cluster: _Cluster):
        self.cluster = cluster
        self.exists = cluster.now + (cluster.about.away if cluster.made >= cluster.about.workers else 0.0)
        cluster.made += 1
        self.free = self.exists + cluster.about.begin
        self.dies = self.exists + cluster.lifetime()
        self.ended = math.inf  # by the sweep itself
        self.ready = SimpleNamespace(remote=lambda: self._call(self.free))
        self.draw = SimpleNamespace(remote=self._draw)
        cluster.actors.append(self)

    def _call(self, end: float, job: Job | None = None) -> _Call:
        return _Call(min(end, self.dies), end > self.dies, job)

    def _draw(self, job: Job) -> _Call:
        begins = max(self.free, self.cluster.now)
        self.free = begins + self.cluster.seconds(job)
        call = self._call(self.free, job)
        if begins < self.dies:
            self.cluster.note(job, begins, call)
        return call


class _Cluster:
    """Stands in for the package ray: the functions that ``ray_engine`` calls, on a simulated clock."""

    def __init__(self, about: Conditions, seconds: Callable[[Job], float], store: _Finished):
        self.about, self.seconds, self.store = about, seconds, store
        self.random = random.Random(about.seed)
        self.now, self.made = 0.0, 0
        self.actors: list[_Actor] = []
        self.outcome = Outcome()
        names = ("RayTaskError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError")
        self.exceptions = SimpleNamespace(
            **{name: type(name, (Exception,), {}) for name in names}, RayActorError=Preempted
        )

    def lifetime(self) -> float:
        """Seconds until a new machine is preempted."""
        if not self.about.preempted:
            return math.inf
        return self.random.expovariate(-math.log(1 - self.about.preempted) / HOUR)

    def note(self, job: Job, begins: float, call: _Call) -> None:
        """Count a shard that a worker begins."""
        self.outcome.begun += 1
        if call.fails:
            self.outcome.cut_off += 1
            self.outcome.lost += call.end - begins
        else:
            self.outcome.useful += call.end - begins

    # ---------------------------------------------------------------------------------------- the package ray

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.about.workers), "CPU": float(self.about.workers)}

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda kind: SimpleNamespace(remote=lambda *_: _Actor(self))

    def wait(self, calls: Sequence[_Call], num_returns: int, timeout: float) -> tuple[list[_Call], list[_Call]]:
        first = min(calls, key=lambda call: call.end)
        if first.end > self.now + timeout:
            self.now += timeout
            return [], list(calls)
        self.now = max(self.now, first.end)
        return [first], [call for call in calls if call is not first]

    def get(self, call: _Call) -> Any:
        if call.fails:
            raise Preempted("the machine was preempted")
        if call.job is not None:
            self.store.finish(call.job)
            return self.store.shard(self.store.cell(call.job.cell), call.job.first, call.job.count)
        return "worker"

    def kill(self, actor: _Actor) -> None:
        actor.ended = self.now


@dataclass
class _Finished:
    """Stands in for the store: which shards are finished."""

    cells: Mapping[str, Cell]
    batch: int
    folder: Any = field(default_factory=lambda: SimpleNamespace(local=False, address="memory://simulation", root=""))
    shards: dict[tuple[str, int], Shard] = field(default_factory=dict)
    twice: int = 0

    def cell(self, name: str) -> Cell:
        return self.cells[name]

    def ranges(self, cell: Cell) -> list[tuple[int, int]]:
        return ranges(cell.images, self.batch)

    def shard(self, cell: Cell, first: int, count: int) -> Shard | None:
        return self.shards.get((cell.id, first))

    def finish(self, job: Job) -> None:
        self.twice += (job.cell, job.first) in self.shards
        self.shards[job.cell, job.first] = Shard("", job.first, job.count, job.count, None, "", 0)


class _Claims:
    """Stands in for the claims of other sweeps: there are none."""

    def take(self, name: str) -> bool:
        return True

    def release(self, name: str) -> None:
        pass


def recorded(store: Store) -> dict[str, list[float]]:
    """Seconds per image of the finished shards of every cell, decoding included.

    Raises:
        UserError: a cell without finished shards.
    """
    out = {}
    for cell in store.cells():
        times = store.times(cell)
        out[cell.id] = [
            (t["seconds"] + t.get("phases", {}).get("decoder", 0.0)) / t["count"] for t in times if t.get("count")
        ]
        if not out[cell.id]:
            raise UserError(f"folder: {cell.id} has no finished shard; draw some first.")
    return out


def simulate(
    cells: Sequence[Cell], seconds: Mapping[str, Sequence[float]], images: int, batch: int, about: Conditions
) -> Outcome:
    """Run the scheduler on a simulated cluster.

    Args:
        cells: of the sweep.
        seconds: per image, recorded ones of every cell.
        images: of every cell.
        batch: images of a shard.
    """
    larger = [replace(cell, images=images) for cell in cells]
    store = _Finished({cell.id: cell for cell in larger}, batch)
    chooser = random.Random(about.seed + 1)
    cluster = _Cluster(about, lambda job: chooser.choice(seconds[job.cell]) * job.count * about.factor, store)
    jobs = jobs_of(store, larger)  # type: ignore[arg-type]
    finished: list[Job] = []
    began = time.process_time()
    with (
        mock.patch.object(ray_engine, "import_ray", lambda: cluster),
        mock.patch.object(ray_engine.time, "sleep", lambda s: setattr(cluster, "now", cluster.now + s)),
    ):
        plan = ray_engine.Cluster(workers=about.workers, gpu=True)
        ray_engine.run(
            store,  # type: ignore[arg-type]
            jobs,
            plan,
            Path(),
            {},
            _Claims(),  # type: ignore[arg-type]
            lambda job, shard: finished.append(job),
        )
    out = cluster.outcome
    out.scheduler = time.process_time() - began
    out.seconds, out.finished, out.twice = cluster.now, len(store.shards), store.twice
    ends = [(actor.exists, min(actor.dies, cluster.now)) for actor in cluster.actors]
    out.existed = sum(max(0.0, end - start) for start, end in ends)
    out.preemptions = sum(actor.exists < actor.dies < cluster.now for actor in cluster.actors)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Print the outcome; returns the exit code."""
    about = Conditions()
    parser = argparse.ArgumentParser(prog="python -m fastar_nodes.tools.scheduling", description=__doc__)
    parser.add_argument("folder", help="a sweep with finished shards of every cell")
    parser.add_argument("--images", type=int, default=50_000, help="images of a cell; default 50000")
    parser.add_argument("--batch", type=int, default=0, help="images of a shard; default the sweep's")
    parser.add_argument("--workers", type=int, default=about.workers, help=f"default {about.workers}")
    parser.add_argument(
        "--preempted", type=float, default=about.preempted, help="share of the machines an hour; default 0.05"
    )
    parser.add_argument("--begin", type=float, default=about.begin, help="seconds to begin; default 60")
    parser.add_argument("--away", type=float, default=about.away, help="seconds without a machine; default 120")
    parser.add_argument("--factor", type=float, default=about.factor, help="of recorded seconds; default 1")
    parser.add_argument("--seed", type=int, default=about.seed)
    options = parser.parse_args(argv)
    names = ("workers", "preempted", "begin", "away", "factor", "seed")
    about = Conditions(**{name: getattr(options, name) for name in names})
    try:
        store = Store(options.folder)
        batch = options.batch or store.manifest()["batch"]
        found = simulate(store.cells(), recorded(store), options.images, batch, about)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    print("\n".join(found.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
