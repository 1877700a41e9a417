"""The folder of a sweep that somebody moves while the sweep runs, or that takes no more files."""

import errno
import os

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import Report
from fastar_nodes.sweeps.store import CellStore, completed

ONE = np.zeros((1, 8, 8, 3), np.uint8), Report("mar", "tiny", {}, 7, 1, "cpu", 2.0)


def test_a_folder_that_fails_keeps_what_it_holds_and_says_so_only_then(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = CellStore(tmp_path / "sweep")
    for kept in ("again", "again; what is finished is kept"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", fails)
            with pytest.raises(
                UserError, match=rf"^folder: .* cannot be written to .*; make it writable and run {kept}\.$"
            ):
                store.write("a", *ONE)
        assert not list((tmp_path / "sweep").glob(".*")), "no unfinished file stays"
        store.write("b", *ONE)


@pytest.mark.parametrize("finished", [0, 1])
def test_cells_of_a_node_are_not_split_between_two_folders(tmp_path, finished):
    """In the run that began the folder, and in one that goes on."""
    store = CellStore(tmp_path / "sweep")
    for name in ["a", "b"][:finished]:
        store.write(name, *ONE)

    def make(i: int):
        if i == 1:
            (tmp_path / "sweep").rename(tmp_path / "moved")
        return ONE

    with pytest.raises(UserError, match="^folder: .*sweep was moved or removed while the sweep ran"):
        list(completed(CellStore(tmp_path / "sweep"), ["a", "b"], make))
    assert os.listdir(tmp_path) == ["moved"] and os.listdir(tmp_path / "moved") == ["a.png"]
