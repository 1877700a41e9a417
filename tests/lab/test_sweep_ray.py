"""The engine on Ray: one worker or several, killed or not, give the files of a single process.

The workers are processes of a cluster of this machine.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import engines
from fastar_nodes.lab.sweeps.engines import Cluster, connect, run_on_ray, tasks_of, unfinished
from fastar_nodes.lab.sweeps.work import numerics
from tiny_sweeps import begin, lasting, table, undisturbed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray():
    if os.name != "posix":
        pytest.skip("these tests end processes by signals of POSIX: the engine on Ray is NOT tested")
    ray = pytest.importorskip("ray", reason="ray is not installed here: the engine on Ray is NOT tested")
    settings = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def on_ray(folder, entries, workers):
    """Draw what is left with Ray; the store and (cell, first image) of what was drawn."""
    store, cells, worker = begin(folder, entries)
    spec = worker.models.spec
    tasks, _ = unfinished(store, tasks_of(store, cells))
    numbers = numerics(spec, worker.models.source)
    drawn = run_on_ray(store, spec, tasks, Cluster(workers=workers), Path("/nowhere"), numbers)
    return store, [(name, shard.first) for name, shard in drawn]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_files(ray, files, whole, tmp_path, workers):
    store, drawn = on_ray(tmp_path, table(files), workers)
    assert lasting(tmp_path) == whole and len(drawn) == len(set(drawn)) == 12


def test_workers_killed_at_random_moments_lose_only_what_they_were_drawing(ray, files, tmp_path):
    entries = table(files, images=24)
    entries["set"] = {**entries["set"], "steps": 16, "diffusion_steps": 60}
    killed, over = [], threading.Event()

    def kill():
        """Kill workers that have finished a shard, at moments in the ones that follow."""
        while len(killed) < 2 and not over.wait(0.05 + 0.07 * (len(killed) % 4)):
            for path in (tmp_path / "sweep" / "cells").rglob("*.time.json"):
                pid = int(json.loads(path.read_text())["worker"].rpartition("-")[2])
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        store, drawn = on_ray(tmp_path / "sweep", entries, 2)
    finally:
        over.set()
        killer.join()
    assert len(killed) == 2
    assert len(drawn) == len(set(drawn)) == 3 * 12, "nothing is lost"
    assert lasting(tmp_path / "sweep") == undisturbed(tmp_path / "alone", entries)


def test_what_a_worker_reports_stops_the_sweep_in_a_sentence(ray, files, tmp_path):
    store, cells, worker = begin(tmp_path, table(files))
    numbers = numerics(worker.models.spec, worker.models.source)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="format 'None'; this version reads 2"):
        list(run_on_ray(store, worker.models.spec, tasks_of(store, cells), Cluster(workers=1), Path("/x"), numbers))


def test_a_task_that_ends_every_worker_stops_the_sweep(ray, files, tmp_path, monkeypatch):
    class Fatal(engines.Drawer):
        def run(self, task):
            os._exit(1)

    monkeypatch.setattr(engines, "Drawer", Fatal)
    with pytest.raises(UserError, match="a task failed 4 times, or the cluster was lost"):
        on_ray(tmp_path, table(files), 1)


def test_without_the_package_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'fastar-nodes\[scale\]'"):
        connect(Cluster())
