"""The engine on Ray: one worker or several, killed or not, give the files of a single process.

The workers are processes of a cluster of this machine. FASTAR_SOAK=1 kills ten of them instead of two, and a head.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.scale import local, ray_engine
from fastar_nodes.scale.claims import Claims
from fastar_nodes.scale.local import jobs_of
from fastar_nodes.scale.ray_engine import Cluster, connect
from fastar_nodes.scale.work import numerics
from tiny_sweeps import begin, command, lasting, table, write_spec

pytestmark = pytest.mark.slow

SOAK = bool(os.environ.get("FASTAR_SOAK"))
KILLS = 10 if SOAK else 2


def has_ray() -> bool:
    """Whether Ray and, in a process of its own, the package can be imported."""
    code = "import ray, fastar_nodes.scale.ray_engine"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


@pytest.fixture(scope="module")
def ray():
    if os.name != "posix":
        pytest.skip("these tests end processes by signals of POSIX: the engine on Ray is NOT tested")
    if not has_ray():
        pytest.skip("ray is not installed here, or this package is not: the engine on Ray is NOT tested")
    settings = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The lasting files and the table of one process."""
    folder = tmp_path_factory.mktemp("whole")
    store, cells, worker = begin(folder, table(files))
    with Claims(store.folder) as claims:
        local.run(store, jobs_of(store, cells), worker, claims, lambda job, shard: None)
    return lasting(folder), store.table()


def on_ray(folder, entries, workers, done=lambda job, shard: None):
    """Draw what is left with Ray; the store and how many workers ended."""
    store, cells, worker = begin(folder, entries)
    numbers = numerics(worker.models.spec, worker.models.source)
    jobs, _ = local.unfinished(store, jobs_of(store, cells))
    with Claims(store.folder) as claims:
        ended = ray_engine.run(store, jobs, Cluster(workers=workers), Path("/nowhere"), numbers, claims, done)
    return store, ended


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_files(ray, files, whole, tmp_path, workers):
    drawn = []
    store, ended = on_ray(tmp_path, table(files), workers, lambda job, shard: drawn.append(job))
    assert (lasting(tmp_path), store.table(), ended) == (*whole, 0)
    assert len(drawn) == len(set(drawn)) == 12 and store.folder.names("claims") == []


def test_workers_killed_at_random_moments_lose_only_what_they_were_drawing(ray, files, tmp_path):
    entries = table(files, images=12 if KILLS == 2 else 60)
    entries["set"] = {**entries["set"], "ar_steps": 16, "diffusion_steps": 60}
    drawn, killed, over = [], [], threading.Event()

    def kill():
        """Kill workers that have finished a shard, at moments in the ones that follow."""
        while len(killed) < KILLS and not over.wait(0.05 + 0.07 * (len(killed) % 4)):
            for path in (tmp_path / "sweep" / "cells").rglob("*.time.json"):
                pid = int(json.loads(path.read_text())["worker"].rpartition("-")[2])
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        store, ended = on_ray(tmp_path / "sweep", entries, 2, lambda job, shard: drawn.append((job.cell, job.first)))
    finally:
        over.set()
        killer.join()
    assert len(killed) == KILLS and 1 <= ended <= KILLS, "a worker may be killed after its last shard"
    assert len(drawn) == len(set(drawn)) == len(store.cells()) * entries["images"] // 2, "nothing is lost"
    alone, cells, worker = begin(tmp_path / "alone", entries)
    with Claims(alone.folder) as claims:
        local.run(alone, jobs_of(alone, cells), worker, claims, lambda job, shard: None)
    assert lasting(tmp_path / "sweep") == lasting(tmp_path / "alone") and store.table() == alone.table()


def test_what_a_worker_reports_stops_the_sweep_in_a_sentence(ray, files, tmp_path, monkeypatch):
    store, cells, worker = begin(tmp_path, table(files))
    (tmp_path / "manifest.json").write_text("{}")
    numbers = numerics(worker.models.spec, worker.models.source)
    with Claims(store.folder) as claims, pytest.raises(UserError):
        ray_engine.run(
            store, jobs_of(store, cells), Cluster(workers=1), Path("/x"), numbers, claims, lambda job, shard: None
        )
    assert store.folder.names("claims") == []


def test_shards_of_another_sweep_are_waited_for(ray, files, whole, tmp_path):
    store, cells, worker = begin(tmp_path, table(files))
    job = jobs_of(store, cells)[0]
    other = Claims(store.folder)
    other._me["host"] = "elsewhere"
    with other:
        assert other.take(f"{job.cell}-shard-0000000-0000001")

        def done(found, shard):
            # The other sweep finishes when all else is done.
            if sum(len(store.shards(cell)) for cell in cells) == 11 and shard is not None:
                threading.Timer(
                    0.5, lambda: (worker.run_shard(job), other.release(f"{job.cell}-shard-0000000-0000001"))
                ).start()

        on_ray(tmp_path, table(files), 2, done)
    assert (lasting(tmp_path), store.table()) == whole


# ------------------------------------------------------------------------------------------------ without Ray


class Errors:
    class RayTaskError(Exception):
        cause = None

    class RayActorError(Exception):
        pass

    class WorkerCrashedError(Exception):
        pass

    class OutOfMemoryError(Exception):
        pass

    class NodeDiedError(Exception):
        pass


class Handle:
    def __init__(self, ray):
        self.ray = ray
        self.ready = self.draw = self

    def remote(self, job=None):
        call = object()
        self.ray.calls[call] = job
        return call


class FakeRay:
    """Workers whose calls end at once, or as ``ends`` says."""

    exceptions = Errors

    def __init__(self, store, ends=lambda job: None):
        self.store, self.ends, self.calls, self.killed = store, ends, {}, 0

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, **about):
        self.about = about
        return lambda kind: self

    def __call__(self, *args):
        raise AssertionError

    def wait(self, calls, num_returns, timeout):
        return calls[:1], calls[1:]

    def get(self, call):
        job = self.calls.pop(call)
        if job is None:
            return "name"
        error = self.ends(job)
        if error is not None:
            raise error
        return job

    def kill(self, handle):
        self.killed += 1


@pytest.fixture
def fake(files, tmp_path, monkeypatch):
    store, cells, _ = begin(tmp_path, table(files))

    def run(ends, workers=0):
        ray = FakeRay(store, ends)
        monkeypatch.setattr(ray_engine, "import_ray", lambda: ray)
        monkeypatch.setattr(FakeRay, "remote", lambda self, **about: lambda kind: Kind(self))
        drawn = []
        with Claims(store.folder) as claims:
            ended = ray_engine.run(
                store,
                jobs_of(store, cells),
                Cluster(workers=workers),
                Path("/x"),
                {},
                claims,
                lambda job, shard: drawn.append(shard),
            )
        assert ray.killed == (workers or 2), "all workers are ended"
        return drawn, ended

    return run


class Kind:
    def __init__(self, ray):
        self.ray = ray

    def remote(self, *args):
        return Handle(self.ray)


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_every_shard_is_assigned_once(fake, workers):
    drawn, ended = fake(lambda job: None, workers)
    assert len(drawn) == len({(j.cell, j.first) for j in drawn}) == 12 and ended == 0


def test_a_worker_that_ran_out_of_memory_is_followed_by_one_with_half_the_batch(fake):
    def ends(job):
        heavy = job.first == 2 and job.at_most != 1
        return Errors.RayActorError("1 worker(s) were killed due to the node running low on memory.") if heavy else None

    drawn, ended = fake(ends)
    assert len({(j.cell, j.first) for j in drawn}) == 12 and ended == 3
    assert {j.at_most for j in drawn if j.first == 2} == {1} and {j.at_most for j in drawn if j.first != 2} == {0}


def test_a_killed_worker_is_followed_by_one_with_the_same_batch(fake):
    """Ray's message about it mentions memory as a possible cause."""
    kills = ["killed by the OOM killer due to high memory usage, or another unexpected error"] * 4
    drawn, ended = fake(lambda job: Errors.RayActorError(kills.pop()) if job.first == 2 and kills else None)
    assert ended == 4 and {j.at_most for j in drawn} == {0}


def test_after_several_ends_memory_is_suspected(fake):
    drawn, ended = fake(lambda job: Errors.RayActorError("killed") if job.first == 2 and not job.at_most else None)
    assert ended == 15 and {j.at_most for j in drawn if j.first == 2} == {1}


def test_a_shard_that_ends_every_worker_stops_the_sweep(fake):
    with pytest.raises(UserError, match="ended 10 workers"):
        fake(lambda job: Errors.WorkerCrashedError("segmentation fault") if job.first == 4 else None, 1)


def test_workers_that_never_begin_stop_the_sweep(fake, monkeypatch):
    def get(self, call):
        raise Errors.RayActorError("cannot import")

    monkeypatch.setattr(FakeRay, "get", get)
    with pytest.raises(UserError, match="end before they begin"):
        fake(lambda job: None, 1)


def test_without_the_package_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'fastar-nodes\[scale\]'"):
        connect(Cluster())


# ------------------------------------------------------------------------------------------------ a head of its own


def start_head(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A cluster of two CPUs; its head ends with the process."""
    ray_command = Path(sys.executable).with_name("ray")
    options = [f"--port={port}", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={folder}", "--block"]
    return subprocess.Popen(
        [ray_command, "start", "--head", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end_head(head: subprocess.Popen[bytes]) -> None:
    """End a head with its servers at once, as a lost machine does; the workers end when they notice."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children = [int(pid) for pid, parent in map(str.split, listed.splitlines()) if int(parent) == head.pid]
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    head.kill()
    head.wait()
    assert len(children) >= 2


@pytest.mark.skipif(
    not SOAK, reason="two clusters take two minutes: set FASTAR_SOAK=1 to test a head that is restarted"
)
def test_a_sweep_goes_on_after_its_head_was_restarted(ray, files, tmp_path, tmp_path_factory):
    entries = table(files, images=40)
    entries["set"] = {**entries["set"], "ar_steps": 16, "diffusion_steps": 60}
    spec = write_spec(tmp_path / "spec.json", **entries)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = command(spec, "--out", tmp_path / "sweep", "--ray", f"127.0.0.1:{port}", "--workers", 2)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:  # sockets have short names
        unreachable = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert unreachable.returncode == 2 and "no cluster answers" in unreachable.stderr
        assert not (tmp_path / "sweep").exists()
        head = start_head(Path(short) / "a", port)
        try:
            driver = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until = time.monotonic() + 120
            while len(list((tmp_path / "sweep").rglob("shard-*.npz"))) < 5:
                assert driver.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            assert driver.poll() is None
        finally:
            end_head(head)
        try:
            driver.wait(30)
        except subprocess.TimeoutExpired:
            driver.kill()
        assert driver.wait() != 0
        finished = {p: p.read_bytes() for p in (tmp_path / "sweep" / "cells").rglob("shard-*.time.json")}
        assert 5 <= len(finished) < 60
        head = start_head(Path(short) / "b", port)
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
        finally:
            end_head(head)
    assert done.returncode == 0, done.stderr
    assert all(p.read_bytes() == data for p, data in finished.items()), "nothing finished is drawn again"
    alone, cells, worker = begin(tmp_path / "alone", entries)
    with Claims(alone.folder) as claims:
        local.run(alone, jobs_of(alone, cells), worker, claims, lambda job, shard: None)
    assert done.stdout.strip() == alone.table() and lasting(tmp_path / "sweep") == lasting(tmp_path / "alone")
