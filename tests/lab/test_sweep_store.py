"""The folder of a sweep: what is complete is read, what is not is not, damage is found, and images are exported."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.folder import Folder
from fastar_nodes.lab.sweeps.records import ranges, sha256
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.sweep import export
from made_sweeps import SMALL as CELL
from made_sweeps import draw, filled
from made_sweeps import random_pictures as pictures
from PIL import Image

pytestmark = pytest.mark.slow


def test_what_is_written_is_read_again(tmp_path):
    filled(tmp_path)
    store = Store(tmp_path)
    assert store.cells() == [CELL] and store.cell(CELL.id) == CELL
    assert [(s.first, s.count) for s in store.shards(CELL)] == ranges(5, 2) == [(0, 2), (2, 2), (4, 1)]
    for shard in store.shards(CELL):
        found = store.pictures(CELL, shard)
        assert np.array_equal(found, pictures(shard.first, shard.count)) and shard.sha256 == sha256(found)
        assert store.labels(CELL, shard).tolist() == list(range(shard.first, shard.first + shard.count))
        assert store.complete(CELL, shard)
        with np.load(io.BytesIO(store.folder.read(f"cells/{CELL.id}/{shard.stem}.npz"))) as file:
            assert np.array_equal(file["arr_0"], found), "the ADM evaluator's form"
    assert {first: t["count"] for first, t in store.times(CELL).items()} == {0: 2, 2: 2, 4: 1}
    sizes = store.folder.sizes(f"cells/{CELL.id}")
    files = {name: size for name, size in sizes.items() if name.endswith(".npz")}
    assert files == {f"{s.stem}.npz": s.bytes for s in store.shards(CELL)}


@pytest.mark.parametrize("cut", [0, 100, 400])
def test_images_that_are_cut_short_are_damaged(tmp_path, cut):
    store = filled(tmp_path)
    shard = store.shards(CELL)[0]
    path = tmp_path / "cells" / CELL.id / f"{shard.stem}.npz"
    path.write_bytes(path.read_bytes()[:cut])
    assert not store.complete(CELL, shard)
    with pytest.raises(UserError, match="missing or damaged"):
        store.pictures(CELL, shard)


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"{}", b'{"key": 1}', b"null", b"\xff"])
def test_damaged_records_do_not_count(tmp_path, record):
    store = filled(tmp_path)
    (tmp_path / "cells" / CELL.id / "shard-0000000-0000001.json").write_bytes(record)
    assert [s.first for s in store.shards(CELL)] == [2, 4]


def test_a_full_disk_leaves_nothing_half(tmp_path, monkeypatch):
    store = filled(tmp_path)
    (tmp_path / "cells" / CELL.id / "shard-0000000-0000001.json").unlink()
    before = sorted(p.name for p in tmp_path.rglob("*"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device.; delete files there and run again"):
        draw(store, 0, 2)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    monkeypatch.undo()
    draw(store, 0, 2)
    assert len(store.shards(CELL)) == 3


def test_parts_of_killed_writers_do_not_count(tmp_path):
    store = filled(tmp_path)
    before = store.folder.sizes("results"), store.folder.sizes(f"cells/{CELL.id}")
    (tmp_path / "results").mkdir()
    for folder in (tmp_path / "results", tmp_path / "cells" / CELL.id):
        (folder / ".x.0123.part.jsonl").write_bytes(b"half")
    assert (store.folder.sizes("results"), store.folder.sizes(f"cells/{CELL.id}")) == before


def pictures_of(store) -> np.ndarray:
    return np.concatenate([store.pictures(CELL, shard) for shard in store.shards(CELL)])


def test_png_holds_one_file_an_image(tmp_path):
    store = filled(tmp_path)
    name, pictures = export(store, CELL), pictures_of(store)
    assert list(store.folder.sizes(name)) == [f"{i:07d}.png" for i in range(5)]
    for i, picture in enumerate(pictures):
        assert np.array_equal(Image.open(io.BytesIO(store.folder.read(f"{name}/{i:07d}.png"))), picture)


def test_a_test_of_a_folder_leaves_no_file(tmp_path):
    folder = filled(tmp_path / "sweep").folder
    before = sorted(tmp_path.rglob("*"))
    folder.check("out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tested_folder_is_never_removed_again(tmp_path, monkeypatch):
    """Processes of torchrun start at the same time: one may write to the folder while another one still tests it."""
    ours = tmp_path / "new" / "sweep"
    removed = []
    rmdir = Path.rmdir
    monkeypatch.setattr(Path, "rmdir", lambda folder: (removed.append(folder), rmdir(folder)))
    Folder(ours).check("out")
    assert ours.is_dir() and removed == []


def test_of_a_folder_only_what_was_made_for_it_is_removed(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there", "there/new/sweep"):
        folder = Folder(tmp_path / name)
        folder.check("out")
        folder.remove_made()
    assert os.listdir(tmp_path / "there") == []

    folder = Folder(tmp_path / "new" / "sweep")
    folder.check("out")
    folder.write("x", b"1")
    folder.remove_made()
    assert folder.read("x") == b"1"


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^out: .* cannot be written "):
        Folder(tmp_path / "file" / "sweep").check("out")


def test_names_that_are_no_utf_8_are_kept(tmp_path):
    name = os.fsdecode(b"caf\xe9.safetensors")
    store = Store(tmp_path)
    store.write_manifest({"batch": 2, "spec": {"model": name}}, [CELL])
    assert Store(tmp_path).manifest()["spec"]["model"] == name


def test_a_folder_that_is_moved_while_it_is_used_is_not_made_anew(tmp_path):
    folder = Folder(tmp_path / "sweep")
    folder.check("out")
    folder.write("cells/a", b"1")
    reader = Folder(tmp_path / "sweep")
    assert reader.read("cells/a") == b"1"

    (tmp_path / "sweep").rename(tmp_path / "moved")
    for used in (folder, reader):
        for use in (lambda used=used: used.write("cells/b", b"2"), lambda used=used: used.check("out")):
            with pytest.raises(UserError, match="^out: .*sweep was moved or removed .*; move the folder back"):
                use()
    assert os.listdir(tmp_path) == ["moved"]

    (tmp_path / "moved").rename(tmp_path / "sweep")
    folder.write("cells/b", b"2")
    assert reader.read("cells/b") == b"2", "the remedy"
