"""The folder of a sweep: what is complete is read, what is not is not, damage is found, and images are exported."""

import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.folder import PART, Folder
from fastar_nodes.lab.sweeps.records import ranges, sha256
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.sweep import export, image_path
from made_sweeps import SMALL as CELL
from made_sweeps import draw, filled
from made_sweeps import random_pictures as pictures
from PIL import Image

pytestmark = pytest.mark.slow


def test_what_is_written_is_read_again(address):
    filled(address)
    store = Store(address)
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
    row = store.table().splitlines()[2].split("|")
    assert [c.strip() for c in row[1:3] + row[4:8]] == [CELL.id, "5", "3.00", "", "4.00", "50.00 %"]


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

    monkeypatch.setattr(store.folder._fs, "mv", full)
    with pytest.raises(UserError, match="No space left on device.; free space there and run again"):
        draw(store, 0, 2)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    monkeypatch.undo()
    draw(store, 0, 2)
    assert len(store.shards(CELL)) == 3


def test_a_writer_that_is_overtaken_does_not_fail(tmp_path, monkeypatch):
    """Another writer of the same file finishes first and removes what seems left behind."""
    folder, calls = Folder(tmp_path), []
    move = folder._fs.mv

    def overtaken(part: str, path: str) -> None:
        calls.append(part)
        if len(calls) == 1:
            folder.write("x", b"1234")
            assert not os.path.exists(part)
        move(part, path)

    monkeypatch.setattr(folder._fs, "mv", overtaken)
    folder.write("x", b"1234")
    assert len(calls) == 2 and folder.read("x") == b"1234" and os.listdir(tmp_path) == ["x"]


def test_parts_of_killed_writers_are_removed_with_the_next_shard(tmp_path):
    store = filled(tmp_path)
    folder = tmp_path / "cells" / CELL.id
    left = folder / f"shard-0000000-0000001.npz{PART}99-1-host"
    left.write_bytes(b"half")
    (folder / "shard-0000000-0000001.npz").unlink()
    assert not any(PART in name for name in store.folder.sizes(f"cells/{CELL.id}"))
    draw(store, 0, 2)
    assert not left.exists()


def pictures_of(store) -> np.ndarray:
    return np.concatenate([store.pictures(CELL, shard) for shard in store.shards(CELL)])


def test_png_holds_one_file_an_image(address):
    store = filled(address)
    name, pictures = export(store, CELL), pictures_of(store)
    assert list(store.folder.sizes(name)) == [f"{i:07d}.png" for i in range(5)]
    for i, picture in enumerate(pictures):
        assert np.array_equal(Image.open(io.BytesIO(store.folder.read(f"{name}/{i:07d}.png"))), picture)


def test_prompts_go_to_genevals_folders(address):
    prompts = [{"tag": "colors", "prompt": "a red boat"}, {"tag": "counting", "prompt": "two cats"}]
    store = filled(address, [prompts[i % 2]["prompt"] for i in range(5)])
    name, pictures = export(store, CELL, prompts), pictures_of(store)
    assert json.loads(store.folder.read(f"{name}/00001/metadata.jsonl")) == prompts[1]
    assert list(store.folder.sizes(f"{name}/00000/samples")) == ["00000.png", "00001.png", "00002.png"]
    drawn = io.BytesIO(store.folder.read(f"{name}/00001/samples/00001.png"))
    assert np.array_equal(Image.open(drawn), pictures[3])


def test_a_test_of_a_folder_leaves_no_file(address):
    folder = filled(address).folder
    before = folder._fs.find(folder.root)
    folder.check("out")
    Store(f"{address}/new").folder.check("out")
    assert folder._fs.find(folder.root) == before


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


def test_images_lie_where_the_tools_of_benchmarks_look():
    """Image 3 of two prompts is the second one of prompt 1."""
    dpg = [{"prompt": "a", "dpg_bench": "midjourney3"}, {"prompt": "b", "dpg_bench": "partiprompts1"}]
    assert image_path(3, dpg) == "00001/partiprompts1.png"
    hps = [
        {"prompt": "a", "hpsv2_style": "anime", "hpsv2_number": 0},
        {"prompt": "b", "hpsv2_style": "photo", "hpsv2_number": 7},
    ]
    assert [image_path(i, hps) for i in (0, 3)] == ["00000/anime/00000.jpg", "00001/photo/00007.jpg"]
    for wrong in ({"dpg_bench": "../up"}, {"hpsv2_style": "a/b", "hpsv2_number": 1}):
        with pytest.raises(UserError, match="^prompts: .* cannot be the name of a file"):
            image_path(0, [{"prompt": "a", **wrong}])
    with pytest.raises(UserError, match="^hpsv2_number"):
        image_path(0, [{"prompt": "a", "hpsv2_style": "anime", "hpsv2_number": "x"}])


def test_a_folder_that_is_moved_while_it_is_used_is_not_made_anew(tmp_path):
    folder = Folder(tmp_path / "sweep")
    folder.check("out")
    folder.write("cells/a", b"1")
    reader = Folder(tmp_path / "sweep")
    assert reader.read("cells/a") == b"1"

    (tmp_path / "sweep").rename(tmp_path / "moved")
    for used in (folder, reader):
        for use in (lambda used=used: used.write("cells/b", b"2"), lambda used=used: used.check("out")):
            with pytest.raises(UserError, match="^out: .*sweep was moved or removed while the sweep ran; move it back"):
                use()
    assert os.listdir(tmp_path) == ["moved"]

    (tmp_path / "moved").rename(tmp_path / "sweep")
    folder.write("cells/b", b"2")
    assert reader.read("cells/b") == b"2", "the remedy"


def test_a_folder_that_fails_keeps_what_it_holds_and_says_so_only_then(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder = Folder(tmp_path / "sweep")
    for kept in ("again.", "again; what is finished is kept."):
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "_replace", fails)
            with pytest.raises(UserError, match=f"^out: .* cannot be written to .*; make it writable and run {kept}$"):
                folder.write("cells/a", b"1")
        folder.write("cells/b", b"2")
