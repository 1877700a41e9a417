"""The folder of a sweep that somebody moves while the sweep runs, or that takes no more files."""

import errno
import os

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import Report
from fastar_nodes.sweeps.folder import Folder
from fastar_nodes.sweeps.store import CellStore, completed


def test_a_folder_that_is_moved_while_it_is_used_is_not_made_anew(tmp_path):
    folder = Folder(tmp_path / "sweep")
    folder.check("out")
    folder.write("cells/a", b"1")
    reader = Folder(tmp_path / "sweep")
    assert reader.read("cells/a", 9) == b"1"

    (tmp_path / "sweep").rename(tmp_path / "moved")
    for used in (folder, reader):
        for use in (lambda used=used: used.write("cells/b", b"2"), lambda used=used: used.check("out")):
            with pytest.raises(UserError, match="^out: .*sweep was moved or removed while the sweep ran; move it back"):
                use()
    assert os.listdir(tmp_path) == ["moved"]

    (tmp_path / "moved").rename(tmp_path / "sweep")
    folder.write("cells/b", b"2")
    assert reader.read("cells/b", 9) == b"2", "the remedy"


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


@pytest.mark.parametrize("finished", [0, 1])
def test_cells_of_a_node_are_not_split_between_two_folders(tmp_path, finished):
    """In the run that began the folder, and in one that goes on."""
    one = np.zeros((1, 8, 8, 3), np.uint8), Report("mar", "tiny", {}, 7, 1, "cpu", 2.0)
    store = CellStore(tmp_path / "sweep")
    for name in ["a", "b"][:finished]:
        store.write(name, *one)

    def make(i: int):
        if i == 1:
            (tmp_path / "sweep").rename(tmp_path / "moved")
        return one

    with pytest.raises(UserError, match="^folder: .*sweep was moved or removed while the sweep ran"):
        list(completed(CellStore(tmp_path / "sweep"), ["a", "b"], make))
    assert os.listdir(tmp_path) == ["moved"] and os.listdir(tmp_path / "moved") == ["a.png"]
