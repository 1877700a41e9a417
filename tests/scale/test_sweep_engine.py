"""The engine of one process: whatever happens on the way, the folder ends up as that of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.samplers import registry
from fastar_nodes.scale import local, plan, work
from fastar_nodes.scale.claims import Claims
from fastar_nodes.scale.estimate import estimates, paired, time_cell
from fastar_nodes.scale.local import jobs_of, unfinished
from fastar_nodes.scale.store import Store
from fastar_nodes.scale.work import Job
from tiny_sweeps import begin, command, lasting, table, tokens, write_files, write_mar, write_spec


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The lasting files and the table of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    store, drawn = finish(folder, table(files))
    assert len(drawn) == 12
    return lasting(folder), store.table()


def finish(folder, entries, worker=None, **parts):
    """Draw what is left; the store and the jobs that this call drew."""
    store, cells, own = begin(folder, entries)
    jobs, _ = unfinished(store, jobs_of(store, cells, **parts))
    drawn = []
    with Claims(store.folder) as claims:
        local.run(store, jobs, worker or own, claims, lambda job, shard: shard is not None and drawn.append(job))
    return store, drawn


def test_a_finished_sweep_draws_nothing(files, whole, tmp_path):
    finish(tmp_path, table(files))
    store, drawn = finish(tmp_path, table(files))
    assert drawn == [] and (lasting(tmp_path), store.table()) == whole
    assert store.folder.names("claims") == []


def test_cells_of_a_range_follow_each_other(files, tmp_path):
    store, cells, _ = begin(tmp_path, table(files))
    ids = [cell.id for cell in cells]
    assert [(j.cell, j.first) for j in jobs_of(store, cells)] == [(i, f) for f in (0, 2, 4, 6) for i in ids]
    assert [c.baseline for c in cells] == [None, ids[0], ids[0]] and [c.size for c in cells] == [(8, 8)] * 3


@pytest.mark.parametrize("world", [2, 3, 5, 12, 20])
def test_a_static_split_gives_every_shard_to_one_process(files, tmp_path, world):
    store, cells, _ = begin(tmp_path, table(files))
    parts = [jobs_of(store, cells, rank, world) for rank in range(world)]
    assert sorted(map(str, sum(parts, []))) == sorted(map(str, jobs_of(store, cells)))
    assert max(map(len, parts)) - min(map(len, parts)) <= len(cells)


def test_a_split_sweep_equals_a_whole_one(files, whole, tmp_path):
    for rank in (1, 0):
        store, drawn = finish(tmp_path, table(files), rank=rank, world=2)
        assert len(drawn) == 6
    assert (lasting(tmp_path), store.table()) == whole


def test_more_images_later_keep_the_finished_ones(files, whole, tmp_path):
    finish(tmp_path, table(files, images=4))
    store, drawn = finish(tmp_path, table(files))
    assert {j.first for j in drawn} == {4, 6}
    assert store.table() == whole[1]


def test_an_interrupted_sweep_goes_on(files, whole, tmp_path):
    """It is interrupted in the middle of every kind of step, several times."""
    store, cells, worker = begin(tmp_path, table(files))
    jobs = jobs_of(store, cells)
    calls = 0

    def interrupt(done, total):
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise KeyboardInterrupt

    drawn = []
    for _ in range(40):
        left, _ = unfinished(store, jobs)
        try:
            with Claims(store.folder) as claims:
                local.run(
                    store, left, worker, claims, lambda job, shard: drawn.append((job.cell, job.first)), interrupt
                )
            break
        except KeyboardInterrupt:
            assert store.folder.names("claims") == []
    assert calls > 40 and len(drawn) == len(set(drawn)) == 12, "each shard is finished once"
    assert (lasting(tmp_path), store.table()) == whole


def test_corrupt_shards_are_drawn_again(files, whole, tmp_path):
    store, _ = finish(tmp_path, table(files))
    paths = sorted((tmp_path / "cells").rglob("*.npz"))
    flipped = bytearray(paths[0].read_bytes())
    flipped[-500] ^= 64
    paths[0].write_bytes(flipped)
    paths[3].write_bytes(paths[2].read_bytes())  # of another range
    paths[5].write_bytes(
        paths[5].read_bytes().replace(b"\x02\0\0\0\0\0\0\0\x03\0", b"\x02\0\0\0\0\0\0\0\x07\0")
    )  # labels 2 and 3
    paths[7].unlink()
    paths[9].with_suffix(".json").write_text("{")
    left, damaged = unfinished(store, jobs_of(store, store.cells()))
    assert (len(left), damaged) == (5, 4)
    store, drawn = finish(tmp_path, table(files))
    assert (lasting(tmp_path), store.table()) == whole


def test_a_changed_setting_makes_cells_of_its_own_and_the_way_back_draws_nothing(files, whole, tmp_path):
    finish(tmp_path, table(files))
    other = table(files)
    other["set"] = {**other["set"], "fasthybrid.threshold": [0.5, 0.7]}
    store, drawn = finish(tmp_path, other)
    assert len(drawn) == 4, "the other two cells stay"
    assert store.table() != whole[1]
    store, drawn = finish(tmp_path, table(files))
    assert drawn == [] and store.table() == whole[1]


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch": 4}, {"labels": ["cat"]}, {"dtype": "bf16"}, {"threads": 2}])
def test_all_that_pictures_depend_on_is_in_the_key(files, tmp_path, change):
    keys = {c.key for entries in (table(files), table(files, **change)) for c in begin(tmp_path, entries)[1]}
    assert len(keys) == 6


def test_the_algorithms_number_and_the_models_file_are_in_the_key(files, tmp_path, monkeypatch):
    keys = [{c.key for c in begin(tmp_path, table(files))[1]}]
    monkeypatch.setattr(plan, "ALGORITHM", registry.ALGORITHM + 1)
    keys.append({c.key for c in begin(tmp_path, table(files))[1]})
    monkeypatch.undo()
    model, decoder = (shutil.copy(path, tmp_path) for path in (files.mar, files.kl))
    moved = table(files, model=str(model), decoder=str(decoder))
    assert {c.key for c in begin(tmp_path, moved)[1]} == keys[0], "the place of a file is not in it"
    changed = bytearray(decoder_bytes := open(decoder, "rb").read())
    changed[len(decoder_bytes) // 2] ^= 1
    open(decoder, "wb").write(changed)
    keys.append({c.key for c in begin(tmp_path, moved)[1]})
    assert len(set.union(*keys)) == 9


def test_a_worker_with_other_files_stops(files, tmp_path):
    model, decoder = (shutil.copy(path, tmp_path) for path in (files.mar, files.kl))
    store, cells, worker = begin(tmp_path / "sweep", table(files, model=str(model), decoder=str(decoder)))
    worker.models._ready = worker.models._name = None
    shutil.copy(write_files(tmp_path).llamagen, model)
    with pytest.raises(UserError):
        worker.run_shard(Job(cells[0].id, 0, 2))


def test_a_smaller_batch_after_too_little_memory_is_recorded(files, whole, tmp_path, monkeypatch):
    store, cells, worker = begin(tmp_path, table(files, batch=8))
    start = work.begin

    def too_much(entry, ready, settings, condition, seed, first, part):
        if len(part) > 2:
            raise MemoryError
        return start(entry, ready, settings, condition, seed, first, part)

    monkeypatch.setattr(work, "begin", too_much)
    shard = worker.run_shard(Job(cells[0].id, 0, 8))
    assert (shard.batch, shard.retried_batch) == (8, 2)
    pictures = store.pictures(cells[0], shard)
    # Parts of 2 are the shards of 2 of the undisturbed run.
    alone = finish(tmp_path / "alone", table(files))[0]
    assert np.array_equal(pictures, np.concatenate([p for _, p in alone.images(alone.cells()[0])]))
    monkeypatch.undo()
    assert worker.run_shard(Job(cells[1].id, 0, 8)).retried_batch is None
    assert worker.run_shard(Job(cells[1].id, 0, 8, at_most=4)).retried_batch == 4


def test_pictures_depend_on_the_index_and_labels_are_balanced(files, tmp_path):
    store, _ = finish(tmp_path / "a", table(files, images=12, batch=3))
    other, _ = finish(tmp_path / "b", table(files, images=12, batch=6))
    for cell, same in zip(store.cells(), other.cells(), strict=True):
        a, b = (np.concatenate([p for _, p in s.images(c)]) for s, c in ((store, cell), (other, same)))
        assert np.abs(a.astype(int) - b).max() <= 1, "to rounding"
        assert len({p.tobytes() for p in a}) == 12
        labels = np.concatenate([store.labels(cell, s) for s in store.shards(cell)])
        assert labels.tolist() == [i % 10 for i in range(12)]


def test_token_models_draw_the_same_in_any_order(files, tmp_path):
    store, _ = finish(tmp_path / "a", tokens(files))
    for rank in (1, 0):
        finish(tmp_path / "b", tokens(files), rank=rank, world=2)
    assert lasting(tmp_path / "a") == lasting(tmp_path / "b") and len(store.shards(store.cells()[1])) == 4


def test_several_models_are_loaded_one_after_another(files, tmp_path, monkeypatch):
    loads = []
    load = work.load
    monkeypatch.setattr(work, "load", lambda family, choice, *more: loads.append(choice) or load(family, choice, *more))
    second = write_mar(tmp_path / "second.safetensors", 5)
    store, drawn = finish(tmp_path / "sweep", table(files, model=[str(files.mar), str(second)]))
    assert len(drawn) == 24 and loads == [str(files.mar), str(second)] * 2, "once to plan, once to draw"
    assert {c.title.rpartition(", ")[2] for c in store.cells()} == {"tiny.safetensors", "second.safetensors"}
    assert all(c.baseline is None or store.cell(c.baseline).model == c.model for c in store.cells())


def test_times_are_paired_within_a_process(files, tmp_path):
    store, _ = finish(tmp_path, table(files, images=7))
    found = paired(store)["cells"]
    mar, *others = (found[c.id] for c in store.cells())
    assert mar["ratio"] is None and mar["pairs"] == 0
    for other in others:
        assert other["pairs"] == 3, "whole shards only"
        assert other["low"] <= other["ratio"] <= other["high"] and other["seconds"] > 0


def test_estimates_follow_from_the_seconds_of_an_image(files, tmp_path):
    seconds = {}
    spec_cells = []

    def measure(cell, prepared):
        seconds[cell.id] = time_cell(prepared, worker.conditions, cell, 2)
        spec_cells.append(cell)

    store, cells, worker = begin(tmp_path, table(files, images=7))
    spec = worker.models.spec
    plan.plan(spec, worker.models, worker.conditions, work.numerics(spec, worker.models.source), measure)
    assert [c.id for c in spec_cells] == [c.id for c in cells] and min(seconds.values()) > 0
    found = estimates(cells, {c.id: 0.5 * (i + 1) for i, c in enumerate(cells)}, 2)
    assert [e.shards for e in found] == [4, 4, 4] and [e.seconds for e in found] == [3.5, 7.0, 10.5]
    assert [e.ratio for e in found] == [None, 0.5, 1 / 3] and found[0].disk == 7 * 8 * 8 * 3


# ------------------------------------------------------------------------------------------------ processes


def test_two_sweeps_on_one_folder_share_the_work(files, whole, tmp_path):
    """Two threads with the marks of two machines."""
    drawn, stores = [], []

    def sweep(name):
        store, cells, worker = begin(tmp_path, table(files))
        stores.append(store)
        with Claims(store.folder) as claims:
            claims._me["host"] = name
            started.wait(60)
            local.run(
                store,
                jobs_of(store, cells),
                worker,
                claims,
                lambda job, shard: shard is not None and drawn.append((name, job)),
            )

    started = threading.Barrier(2)
    threads = [threading.Thread(target=sweep, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(drawn) == len({job for _, job in drawn}) == 12, "no shard is drawn twice"
    assert {name for name, _ in drawn} == {"a", "b"}
    assert (lasting(tmp_path), stores[0].table()) == whole


@pytest.mark.skipif(os.name != "posix", reason="processes are ended by signals of POSIX")
def test_killed_processes_lose_only_the_shard_in_flight(files, tmp_path):
    """SIGKILL at other moments, then SIGTERM, then to the end; the files equal those of an undisturbed run."""
    entries = table(files, images=40, batch=2)
    entries["set"] = {**entries["set"], "ar_steps": 16, "diffusion_steps": 20}
    spec = write_spec(tmp_path / "spec.json", **entries)
    argv = command(spec, "--out", tmp_path / "sweep")
    store = Store(tmp_path / "sweep")
    seen: dict[str, bytes] = {}
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        before = len(list((tmp_path / "sweep").rglob("shard-*.npz")))
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        while len(list((tmp_path / "sweep").rglob("shard-*.npz"))) < before + 4 and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGTERM else -number)
        for name, data in seen.items():
            assert (tmp_path / "sweep" / name).read_bytes() == data, "a finished shard is not written again"
        records = [p for p in (tmp_path / "sweep" / "cells").rglob("shard-*.json") if "time" not in p.name]
        seen |= {p.relative_to(tmp_path / "sweep").as_posix(): p.read_bytes() for p in records}
    assert "the same command goes on" in errors and len(seen) >= 9
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "sweep" / "cells").rglob("*.time.json")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    finished = {
        p for p in times if p.with_name(p.name.replace(".time", "")).relative_to(tmp_path / "sweep").as_posix() in seen
    }
    assert all(p.stat().st_mtime_ns == times[p] for p in finished), "nothing finished is drawn again"
    alone, _ = finish(tmp_path / "alone", entries)
    assert lasting(tmp_path / "sweep") == lasting(tmp_path / "alone")
    assert done.stdout.strip() == alone.table() == store.table()
