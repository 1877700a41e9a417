"""Sweep folders that a stranger made: each is refused in one line, within 64 MB beyond an ordinary folder's.

Every case runs in a process of its own, and its memory is compared with that of a sound folder.
"""

import json
import os
import re
from pathlib import Path

import made_sweeps
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.measures import Means, evaluate, read_results
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.sweep import export

pytestmark = pytest.mark.slow

budget = pytest.importorskip("budget")
if not budget.available():
    pytest.skip("needs fork and /proc", allow_module_level=True)

SHARD = "cells/fasthybrid-0.8/shard-0000000-0000007"


def edit(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def replaced(folder: Path, name: str) -> Path:
    path = folder / name
    path.unlink()
    return path


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(40 << 30)


def encrypted(path: Path) -> None:
    """An npz file whose members claim to be encrypted."""
    flags = re.compile(rb"(PK\x03\x04..|PK\x01\x02....)(.)", re.DOTALL)
    path.write_bytes(flags.sub(lambda found: found[1] + bytes([found[2][0] | 1]), path.read_bytes()))


def out_of(folder: Path, name: str) -> None:
    """The file lies elsewhere, and a link leads to it."""
    elsewhere = folder.parent / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)


def cells_elsewhere(folder: Path) -> None:
    (folder / "cells").rename(folder.parent / "other")
    (folder / "cells").symlink_to(folder.parent / "other")


def another_cell(folder: Path) -> None:
    """The manifest names a folder beside the cells, with a sound cell in it."""
    (folder / "cells" / "mar-0").rename(folder.parent / "mar-0")
    edit(folder, "manifest.json", cells=["../../../mar-0"])


def many_claims(folder: Path) -> None:
    """Ten million images of which none is there."""
    for path in (folder / "cells").rglob("cell.json"):
        edit(path.parent, "cell.json", images=10_000_000)
    edit(folder, "manifest.json", batch=1)
    for path in (folder / "cells").rglob("shard-*"):
        path.unlink()


# Name, what is done to the folder, and words of the line.
CASES = {
    "a manifest that is a FIFO": (lambda f: os.mkfifo(replaced(f, "manifest.json")), "manifest.json .* is not a file"),
    "a manifest of 40 GB": (lambda f: sparse(f / "manifest.json"), "manifest.json .* has 42,949,672,960 bytes"),
    "a manifest that is a device": (lambda f: replaced(f, "manifest.json").symlink_to("/dev/zero"), "leads out"),
    "a manifest elsewhere": (lambda f: out_of(f, "manifest.json"), "manifest.json leads out"),
    "cells elsewhere": (cells_elsewhere, "leads out"),
    "a cell outside": (another_cell, "manifest.json .* damaged"),
    "a cell of absurd size": (lambda f: edit(f, "cells/mar-0/cell.json", size=[10**9, 10**9]), "cell.json .* damaged"),
    "an absurd batch": (lambda f: edit(f, "manifest.json", batch=10**18), "manifest.json .* damaged"),
    "images that are not there": (many_claims, "holds no finished shard yet"),
    "images that are a FIFO": (lambda f: os.mkfifo(replaced(f, f"{SHARD}.npz")), "npz .* is not a file"),
    "images that are a folder": (lambda f: replaced(f, f"{SHARD}.npz").mkdir(), "npz .* is not a file"),
    "images of 40 GB": (lambda f: sparse(f / f"{SHARD}.npz"), "npz .* has 42,949,672,960 bytes"),
    "images elsewhere": (lambda f: out_of(f, f"{SHARD}.npz"), "npz leads out"),
    "images that are encrypted": (lambda f: encrypted(f / f"{SHARD}.npz"), "npz .* damaged"),
}
MANIFESTS = [{"format": 99}, {"cells": None}, {"cells": [7]}, {"cells": []}, {"batch": 0}, {"batch": True}]
MANIFESTS += [{"cells": ["mar-0"] * 100_000}]
CELLS = [{"size": [8]}, {"images": "5"}, {"images": 10**30}, {"images": None}, {"seed": -1}, {"id": None}]
CELLS += [{"id": "../../../etc"}, {"baseline": "elsewhere"}, {"settings": 3}]


@pytest.mark.parametrize(
    ("name", "values"),
    [*(("manifest.json", values) for values in MANIFESTS), *(("cells/mar-0/cell.json", values) for values in CELLS)],
    ids=lambda value: str(value)[:40],
)
def test_damaged_tables_are_refused(tmp_path, name, values):
    made_sweeps.write(tmp_path, images=8)
    edit(tmp_path, name, **values)
    with pytest.raises(UserError, match="json|format"):
        Store(tmp_path).cells()


@pytest.mark.parametrize("text", ["[]", "{"])
@pytest.mark.parametrize("name", ["manifest.json", "cells/mar-0/cell.json"])
def test_files_that_are_no_tables_are_refused(tmp_path, name, text):
    made_sweeps.write(tmp_path, images=8)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="json"):
        Store(tmp_path).cells()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measures a folder in a process of its own; and a sound folder, measured so."""

    def measure(folder: Path):
        return budget.measure(lambda: evaluate(Store(folder), ["psnr", "identical"], Means(resamples=10)))

    sound = made_sweeps.write(tmp_path_factory.mktemp("sound")).folder.address
    evaluate(Store(sound), ["psnr", "identical"], Means(resamples=10))  # imports and caches
    return measure, measure(sound)


@pytest.mark.parametrize("name", CASES)
def test_a_strangers_folder_ends_in_one_line(measured, tmp_path, name):
    spoil, words = CASES[name]
    measure, sound = measured
    made_sweeps.write(tmp_path / "sweep")
    spoil(tmp_path / "sweep")
    found = measure(tmp_path / "sweep")
    assert sound.kind == "ok" and not budget.problem(found, 0, sound), found
    assert found.kind == "refused" and re.search(words, found.message), found


def test_results_of_a_stranger_are_bounded(tmp_path):
    store = made_sweeps.write(tmp_path, images=8)
    folder = tmp_path / "results"
    folder.mkdir()
    os.mkfifo(folder / "fifo.jsonl")
    assert read_results(store) == [], "a FIFO is no result"
    (folder / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match="results/deep.jsonl .* damaged"):
        read_results(store)
    sparse(folder / "deep.jsonl")
    with pytest.raises(UserError, match="results/deep.jsonl .* has 42,949,672,960 bytes"):
        read_results(store)


@pytest.mark.parametrize("values", [{"seconds": "x"}, {"seconds": 1e999}, {"seconds": -1}, {"worker": 3}])
def test_absurd_times_are_left_out(tmp_path, values):
    store = made_sweeps.write(tmp_path)
    edit(tmp_path, f"{SHARD}.time.json", **values)
    assert set(store.times(store.cell("fasthybrid-0.8"))) == {8, 16, 24, 32, 40}


def test_nothing_is_written_outside(tmp_path):
    """A folder into which a command would write is a link that leads out."""
    store = made_sweeps.write(tmp_path / "sweep", images=8)
    (tmp_path / "elsewhere").mkdir()
    for name in ("results", "export"):
        (tmp_path / "sweep" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out of"):
        store.append_results([{}])
    with pytest.raises(UserError, match="leads out of"):
        export(store, store.cells()[0])
    assert list((tmp_path / "elsewhere").iterdir()) == []
