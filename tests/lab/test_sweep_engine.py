"""The engine of one process: whatever happens on the way, the folder ends up as that of an undisturbed run."""

import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import work
from fastar_nodes.lab.sweeps.records import shard_key, stem
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.tasks import draw, tasks_of, unfinished
from fastar_nodes.lab.sweeps.work import Worker
from fastar_nodes.runs import registry
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.sweeps import keys as sweep_keys
from tiny_sweeps import begin, command, finish, lasting, table, write_files, write_spec

pytestmark = pytest.mark.slow


def test_names_and_keys_of_ranges_differ():
    """Computed by hand: digits of the first image and of the number of images do not run into each other."""
    assert stem(1, 23) == "shard-0000001-0000023" and stem(12, 3) == "shard-0000012-0000014"
    # sha256 of "k/1/23" and "k/12/3".
    assert shard_key("k", 1, 23) == "2f0939fc46282f39186c1a71ca87c48e"
    assert shard_key("k", 12, 3) == "917d835e43fd1671923b024a3f8b8ab8"


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch": 4}, {"labels": ["cat"]}, {"dtype": "bf16"}, {"threads": 2}])
def test_all_that_pictures_depend_on_is_in_the_key(files, tmp_path, change):
    (name,) = change
    first = begin(tmp_path / "first", table(files))[1]
    other = begin(tmp_path / "other", table(files, **change))[1]
    assert len({c.key for c in [*first, *other]}) == 6
    with pytest.raises(UserError, match="^out: .* holds a sweep of different cells, .* Choose a different folder"):
        begin(tmp_path / "first", table(files, **change))
    assert Store(tmp_path / "first").cells() == first, "the folder is as it was"


def test_the_algorithms_number_and_the_models_file_are_in_the_key(files, tmp_path, monkeypatch):
    keys = [{c.key for c in begin(tmp_path, table(files))[1]}]
    monkeypatch.setattr(work, "ALGORITHM", registry.ALGORITHM + 1)
    monkeypatch.setattr(sweep_keys, "ALGORITHM", registry.ALGORITHM + 1)
    keys.append({c.key for c in begin(tmp_path / "algorithm", table(files))[1]})
    with pytest.raises(UserError, match="^out: .* holds a sweep of different cells"):
        begin(tmp_path, table(files))
    monkeypatch.undo()
    model, decoder = (shutil.copy(path, tmp_path) for path in (files.mar, files.kl))
    moved = table(files, model=str(model), decoder=str(decoder))
    assert {c.key for c in begin(tmp_path, moved)[1]} == keys[0], "the place of a file is not in it"
    changed = bytearray(decoder_bytes := open(decoder, "rb").read())
    changed[len(decoder_bytes) // 2] ^= 1
    open(decoder, "wb").write(changed)
    with pytest.raises(
        UserError, match="^out: .* holds a sweep of different cells, .* remove manifest.json from this folder"
    ):
        begin(tmp_path, moved)
    (tmp_path / "manifest.json").unlink()  # the remedy
    keys.append({c.key for c in begin(tmp_path, moved)[1]})
    assert len(set.union(*keys)) == 9


def test_a_worker_with_other_files_stops(files, tmp_path):
    model, decoder = (shutil.copy(path, tmp_path) for path in (files.mar, files.kl))
    store, cells, worker = begin(tmp_path / "sweep", table(files, model=str(model), decoder=str(decoder)))
    worker.models._loaded = None
    shutil.copy(write_files(tmp_path).llamagen, model)
    with pytest.raises(UserError):
        worker.run_shard(cells[0], 0, 2)


def told(monkeypatch):
    """Records (seed, images of the noise, labels or prompts) of every start of a sampler; nothing is warmed up."""
    starts, begin_ = [], Drawing.begin

    def start(drawing, part):
        sampler = begin_(drawing, part)
        starts.append(
            (drawing.seed, [drawing.numbers[i] for i in part], list(drawing.condition.for_images(part).names))
        )
        return sampler

    monkeypatch.setattr(Drawing, "begin", start)
    monkeypatch.setattr(Worker, "_warm_up", lambda *given: None)
    return starts


def test_a_shard_that_begins_at_40_shows_image_40(files, tmp_path, monkeypatch):
    """Labels in turn: image 40 of ten classes is class 0, of three named ones the second; drawn at
    once and in parts.
    """
    starts = told(monkeypatch)
    store, cells, worker = begin(tmp_path, table(files, images=43, batch=40, labels=["cat", "boat", "tree"], seed=5))
    worker.run_shard(cells[0], 40, 3)
    assert starts == [(5, [40, 41, 42], ["boat", "tree", "cat"])]  # 40 = 13 * 3 + 1
    assert store.labels(cells[0], store.shards(cells[0])[0]).tolist() == [7, 5, 9]
    alone = store.pictures(cells[0], store.shards(cells[0])[0])
    starts.clear()
    begin_ = Drawing.begin

    def little_memory(drawing, part):
        if len(part) > 2:
            raise MemoryError
        return begin_(drawing, part)

    monkeypatch.setattr(Drawing, "begin", little_memory)
    shard = worker.run_shard(cells[0], 40, 3)
    assert starts == [(5, [40, 41], ["boat", "tree"]), (5, [42], ["cat"])] and "2 at a time" in shard.note
    assert np.abs(store.pictures(cells[0], shard).astype(int) - alone).max() <= 1


def test_a_shard_that_begins_at_40_takes_prompt_40(tmp_path, monkeypatch):
    """The built-in model that reads prompts: of 7 prompts image 40 has number 5, as 40 = 5 * 7 + 5."""
    starts = told(monkeypatch)
    prompts = [f"a boat, number {i}" for i in range(7)]
    entries = {"model": "demo-hybrid", "samplers": ["mar"], "set": {"steps": 1, "diffusion_steps": 2}}
    store, cells, worker = begin(tmp_path, {**entries, "images": 42, "batch": 40, "threads": 1, "prompts": prompts})
    worker.run_shard(cells[0], 40, 2)
    assert starts == [(0, [40, 41], [prompts[5], prompts[6]])]
    assert store.labels(cells[0], store.shards(cells[0])[0]).tolist() == [prompts[5], prompts[6]]


def test_pictures_depend_on_the_index_and_labels_are_balanced(files, tmp_path):
    store, _ = finish(tmp_path / "a", table(files, images=12, batch=3))
    other, _ = finish(tmp_path / "b", table(files, images=12, batch=6))
    for cell, same in zip(store.cells(), other.cells(), strict=True):
        a, b = (np.concatenate([s.pictures(c, x) for x in s.shards(c)]) for s, c in ((store, cell), (other, same)))
        assert np.abs(a.astype(int) - b).max() <= 1, "to rounding"
        assert len({p.tobytes() for p in a}) == 12
        labels = np.concatenate([store.labels(cell, s) for s in store.shards(cell)])
        assert labels.tolist() == [i % 10 for i in range(12)]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_static_split_equals_a_whole_sweep(files, whole, tmp_path, world):
    drawn = [finish(tmp_path, table(files), rank=rank, world=world) for rank in reversed(range(world))]
    assert sum(len(own) for _, own in drawn) == 12 and lasting(tmp_path) == whole


def test_more_images_later_keep_the_finished_ones(files, whole, tmp_path):
    finish(tmp_path, table(files, images=4))
    store, drawn = finish(tmp_path, table(files))
    assert {first for _, first in drawn} == {4, 6} and lasting(tmp_path) == whole


def test_an_interrupted_sweep_goes_on(files, whole, tmp_path, monkeypatch):
    """It is interrupted before every kind of file that is written, several times."""
    store, cells, worker = begin(tmp_path, table(files))
    tasks, calls, drawn = tasks_of(store, cells), 0, []
    write = type(store.folder).write

    def interrupted(self, name, data):
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise KeyboardInterrupt
        write(self, name, data)

    monkeypatch.setattr(type(store.folder), "write", interrupted)
    for _ in range(40):
        left, _ = unfinished(store, tasks)
        try:
            drawn.extend((name, shard.first) for name, shard in draw(worker, left))
            break
        except KeyboardInterrupt:
            pass
    monkeypatch.undo()
    assert calls > 40 and lasting(tmp_path) == whole


def test_a_shard_that_another_process_finished_meanwhile_is_not_drawn(files, whole, tmp_path, monkeypatch):
    store, cells, worker = begin(tmp_path, table(files))
    tasks = tasks_of(store, cells)
    finish(tmp_path, table(files))
    monkeypatch.setattr(Worker, "run_shard", lambda *_: pytest.fail("it is there"))
    assert len(list(draw(worker, tasks))) == 12 and lasting(tmp_path) == whole


def test_corrupt_shards_are_drawn_again(files, whole, tmp_path):
    store, _ = finish(tmp_path, table(files))
    paths = sorted((tmp_path / "cells").rglob("*.npz"))
    flipped = bytearray(paths[0].read_bytes())
    flipped[-500] ^= 64
    paths[0].write_bytes(flipped)
    paths[3].write_bytes(paths[2].read_bytes())  # of another range
    labels = b"\x02\0\0\0\0\0\0\0\x03\0"
    assert labels in paths[5].read_bytes()
    paths[5].write_bytes(paths[5].read_bytes().replace(labels, b"\x02\0\0\0\0\0\0\0\x07\0"))
    paths[7].unlink()
    paths[9].with_suffix(".json").write_text("{")
    left, damaged = unfinished(store, tasks_of(store, store.cells()))
    assert (sum(len(t.cells) for t in left), damaged) == (5, 4)
    store, drawn = finish(tmp_path, table(files))
    assert len(drawn) == 5 and lasting(tmp_path) == whole


def test_a_changed_setting_makes_cells_of_its_own_and_the_way_back_draws_nothing(files, whole, tmp_path):
    finish(tmp_path, table(files))
    other = table(files)
    other["set"] = {**other["set"], "fasthybrid.threshold": [0.5, 0.7]}
    store, drawn = finish(tmp_path, other)
    assert len(drawn) == 4, "the other two cells stay"
    _, drawn = finish(tmp_path, table(files))
    assert drawn == [] and whole.items() <= lasting(tmp_path).items()


@pytest.mark.skipif(os.name != "posix", reason="processes are ended by signals of POSIX")
def test_killed_processes_lose_only_the_shard_in_flight(files, tmp_path):
    """SIGKILL at other moments, then SIGINT, then to the end; the files equal those of an undisturbed run."""
    entries = table(files, images=80, batch=2)
    entries["set"] = {**entries["set"], "steps": 16, "diffusion_steps": 20}
    argv = command(write_spec(tmp_path / "spec.json", **entries), "--out", tmp_path / "sweep")
    seen: dict[str, bytes] = {}
    for number in (*[signal.SIGKILL] * 5, signal.SIGINT):
        before = len(list((tmp_path / "sweep").rglob("shard-*.npz")))
        # A shell ignores SIGINT in what it runs in the background, and a process inherits that.
        heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        process = subprocess.Popen(argv, preexec_fn=heard, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        while len(list((tmp_path / "sweep").rglob("shard-*.npz"))) < before + 4 and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            # Python drops an interrupt that arrives while it closes a file, so a person presses Ctrl+C again.
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        for name, data in seen.items():
            assert (tmp_path / "sweep" / name).read_bytes() == data, "a finished shard is not written again"
        records = [p for p in (tmp_path / "sweep" / "cells").rglob("shard-*.json") if "time" not in p.name]
        seen |= {p.relative_to(tmp_path / "sweep").as_posix(): p.read_bytes() for p in records}
    assert "run the same command again to continue" in errors and len(seen) >= 18
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "sweep" / "cells").rglob("*.time.json")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for path, before in times.items():
        name = path.with_name(path.name.replace(".time", "")).relative_to(tmp_path / "sweep").as_posix()
        assert name not in seen or path.stat().st_mtime_ns == before, "nothing finished is drawn again"
    finish(tmp_path / "alone", entries)
    assert lasting(tmp_path / "sweep") == lasting(tmp_path / "alone")
