"""Sweep folders that a stranger made: each ends in one line, within a second and 64 MB beyond an ordinary folder's.

Every case is run by the command in a child process, and its time and memory are compared with those of a run on a sound folder.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import made_sweeps
import pytest
from fastar_nodes.bench.measures import read_results
from fastar_nodes.bench.sweep import export
from fastar_nodes.errors import UserError

# Runs the command on every folder; its time, and its memory in kB beyond what the process had before.
MEASURED = """
import contextlib, io, json, sys, time
sys.path.insert(0, sys.argv.pop(1))
import conftest  # the package under its name
from fastar_nodes.cli.main import main

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

for folder in json.loads(sys.stdin.read()):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before, began = status("VmRSS"), time.process_time()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["evaluate", folder, *sys.argv[1:]])
    seconds, grown = time.process_time() - began, status("VmHWM") - before
    print(json.dumps([seconds, grown, code, out.getvalue(), err.getvalue()]), flush=True)
"""
SHARD = "cells/fasthybrid-0.8/shard-0000000-0000007"
EVALUATE = ("--measures", "psnr,identical", "--resamples", "10", "--device", "cpu")


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
    "a manifest that is a FIFO": (lambda f: os.mkfifo(replaced(f, "manifest.json")), "manifest.json .* is no file"),
    "a manifest that is a folder": (lambda f: replaced(f, "manifest.json").mkdir(), "manifest.json .* is no file"),
    "a manifest of 40 GB": (lambda f: sparse(f / "manifest.json"), "manifest.json .* has 42,949,672,960 bytes"),
    "a manifest that is a device": (lambda f: replaced(f, "manifest.json").symlink_to("/dev/zero"), "leads out"),
    "a manifest elsewhere": (lambda f: out_of(f, "manifest.json"), "manifest.json leads out"),
    "a manifest of many cells": (
        lambda f: edit(f, "manifest.json", cells=["mar-0"] * 100_000),
        "manifest.json .* damaged",
    ),
    "cells elsewhere": (cells_elsewhere, "leads out"),
    "a cell outside": (another_cell, "manifest.json .* damaged"),
    "a cell with another id": (lambda f: edit(f, "cells/mar-0/cell.json", id="../../../etc"), "cell.json .* damaged"),
    **{
        f"a manifest with {about}": (lambda f, about=about: edit(f, "manifest.json", **about), "manifest.json|format")
        for about in ({"format": 99}, {"cells": None}, {"cells": [7]}, {"cells": []}, {"batch": 0}, {"batch": True})
    },
    **{
        f"a cell with {about}": (
            lambda f, about=about: edit(f, "cells/mar-0/cell.json", **about),
            "cell.json .* damaged",
        )
        for about in (
            *({"size": [8]}, {"images": "5"}, {"images": 10**30}, {"seed": -1}, {"id": None}),
            *({"baseline": "elsewhere"}, {"settings": 3}),
        )
    },
    "a manifest that is no table": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json"),
    "a manifest that is cut": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json"),
    "a cell of absurd size": (lambda f: edit(f, "cells/mar-0/cell.json", size=[10**9, 10**9]), "cell.json .* damaged"),
    "a cell without images": (lambda f: edit(f, "cells/mar-0/cell.json", images=None), "cell.json .* damaged"),
    "an absurd batch": (lambda f: edit(f, "manifest.json", batch=10**18), "manifest.json .* damaged"),
    "images that are not there": (many_claims, "holds no finished shard yet"),
    "pictures that are a FIFO": (lambda f: os.mkfifo(replaced(f, f"{SHARD}.npz")), "npz .* is no file"),
    "pictures that are a folder": (lambda f: replaced(f, f"{SHARD}.npz").mkdir(), "npz .* is no file"),
    "pictures of 40 GB": (lambda f: sparse(f / f"{SHARD}.npz"), "npz .* has 42,949,672,960 bytes"),
    "pictures elsewhere": (lambda f: out_of(f, f"{SHARD}.npz"), "npz leads out"),
    "pictures that are encrypted": (lambda f: encrypted(f / f"{SHARD}.npz"), "npz .* damaged"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list]:
    """By case what the command did, of "sound" on a folder without damage; all in one process, which reads that folder first."""
    if not sys.platform.startswith("linux"):
        pytest.skip("FIFOs, devices and the peak memory of a process are those of Linux")
    folders = {}
    for name in ("first", "sound", *CASES):
        folders[name] = tmp_path_factory.mktemp("case") / "sweep"
        made_sweeps.write(folders[name])
        if name in CASES:
            CASES[name][0](folders[name])
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(Path(__file__).parents[1]), *EVALUATE],
        input=json.dumps(list(map(str, folders.values()))),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(folders), done.stderr
    return dict(zip(folders, lines, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_strangers_folder_ends_in_one_line(found, name):
    words = CASES[name][1]
    (sound_seconds, sound_grown, sound_code, *_), (seconds, grown, code, out, err) = found["sound"], found[name]
    assert sound_code == 0 and seconds <= sound_seconds + 1 and grown <= sound_grown + (64 << 10)
    lines = [line for line in err.splitlines() if " measured" not in line]  # of cells before the damaged one
    assert code == 2 and out == "" and len(lines) == 1 and re.search(words, lines[0]), lines


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
