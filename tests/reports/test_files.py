"""Files that commands write: what cannot be written is refused before a run, and what fails after it is kept."""

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import files
from fastar_nodes.reports.files import Result, as_text, distinct, encoded, image_endings, output, save, typed_path
from PIL import Image


def fails(number: int):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_a_test_leaves_nothing_and_the_folder_is_made_with_the_file(tmp_path):
    (tmp_path / "here").mkdir()
    path = output(tmp_path / "here" / "new" / "deep" / "x.png", "out", (".png",))
    assert path == tmp_path / "here" / "new" / "deep" / "x.png"
    assert [place.name for place in tmp_path.rglob("*")] == ["here"], "what was there stays"

    assert save([Result("out", path, b"picture")]) == ""
    assert path.read_bytes() == b"picture" and list(path.parent.iterdir()) == [path]
    assert output(None, "json", (".json",)) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a\0b.png", "characters that no file name can have"),
        ("x" * 300 + ".png", "give a shorter name"),
        ("", "it is empty"),
        ("picture.docx", r"must end in \.png"),
        ("picture", r"must end in \.png"),
        ("folder.png", "is not a file; give the name"),
        ("file/x.png", "folder that you may write to"),
        ("file/deeper/x.png", "folder that you may write to"),
        ("pipe.png", "is not a file; give the name"),
        ("~nosuchuser/x.png", "home folder in ~nosuchuser/x.png is unknown"),
    ],
)
def test_names_that_cannot_be_written(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe.png")
    elif name == "pipe.png":
        pytest.skip("no pipes here")
    before = sorted(os.listdir())
    with pytest.raises(UserError, match="^out: ") as problem:
        output(name, "out", (".png",))
    assert problem.match(words)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "choose a file in a folder that you may write to"),
        (errno.EROFS, "choose a file in a folder that you may write to"),
        (errno.ENOSPC, "free disk space there, or choose a file on a different disk"),
        (errno.EDQUOT, "free disk space there, or choose a file on a different disk"),
    ],
)
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, number, remedy):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", fails(number))
        with pytest.raises(UserError, match=f"^out: .*x.png cannot be written .*; {remedy}"):
            output(tmp_path / "x.png", "out", (".png",))
    assert output(tmp_path / "x.png", "out", (".png",)) == tmp_path / "x.png", "the remedy"


def test_a_folder_that_takes_nothing_is_named_itself(tmp_path, monkeypatch):
    """The user named the folder and no file in it."""
    for number, remedy in ((errno.EROFS, "choose a folder that you may write to"), (errno.ENOSPC, "choose a folder")):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", fails(number))
            with pytest.raises(UserError, match=f"^out: .*sweep cannot be written .*{remedy}"):
                files.writable(tmp_path / "sweep", "out")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^out: .*file cannot be written .*; choose a folder that"):
        files.writable(tmp_path / "file", "out")


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "x.png").write_bytes(b"old")
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write to every file
    with pytest.raises(UserError, match="^out: .* is read-only; make it writable"):
        output(tmp_path / "x.png", "out", (".png",))
    assert (tmp_path / "x.png").read_bytes() == b"old"


def test_home_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert typed_path("~/x.png", "out") == tmp_path / "x.png"
    with pytest.raises(UserError, match=r"^model: .* or put \./ before a name that begins with ~"):
        typed_path("~nosuchuser", "model")
    assert typed_path("./~nosuchuser", "model") == Path("./~nosuchuser"), "the remedy"


def test_two_results_in_one_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    distinct(out=Path("a.png"), maps=None, sheet=Path("b.png"))
    with pytest.raises(UserError, match="^maps: .* is already the file for out"):
        distinct(out=Path("a.png"), maps=tmp_path / "a.png")


def test_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    assert save([Result("json", path, b"old")]) == "" and path.read_bytes() == b"old"
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", fails(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            files.replace_file(path, b"ne")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert save([Result("json", path, b"new")]) == "" and path.read_bytes() == b"new"


def test_a_result_that_fails_late_is_kept_and_the_others_are_written(tmp_path, monkeypatch):
    """A file takes the place of the first folder while the command runs."""
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    kept.mkdir()
    gone.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(kept))
    results = [Result("out", gone / "a.png", b"picture"), Result("json", tmp_path / "b.json", b"{}")]
    results.append(Result("maps", gone / "m.png", b"map"))
    words = save(results)
    assert (tmp_path / "b.json").read_bytes() == b"{}"
    (folder,) = kept.iterdir()
    assert words == f"out (a.png), maps (m.png): could not be written (File exists); saved in {folder} instead"
    assert (folder / "a.png").read_bytes() == b"picture" and (folder / "m.png").read_bytes() == b"map"


def test_without_any_folder_text_is_printed_and_a_picture_is_called_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "mkdtemp", fails(errno.ENOSPC))
    (tmp_path / "gone").touch()
    lost, text = (
        Result("out", tmp_path / "gone" / "a.png", b"\x89PNG"),
        Result("json", tmp_path / "gone" / "b.json", b'{"a": 1}'),
    )
    assert save([text]).endswith("FastAR could not write to any other folder either and printed the text")
    assert capsys.readouterr().out == 'b.json:\n{"a": 1}\n'
    assert save([lost]).endswith("a.png could not be written to any other folder either, so it is lost")


def test_pictures_are_encoded_by_their_ending(tmp_path):
    picture = np.zeros((8, 12, 3), np.uint8)
    assert {".png", ".jpg", ".jpeg"} <= {*image_endings()}
    for ending, kind in ((".png", "PNG"), (".JPG", "JPEG")):
        path = tmp_path / f"x{ending}"
        path.write_bytes(encoded(picture, path))
        with Image.open(path) as found:
            assert found.format == kind and found.size == (12, 8)


def test_names_that_are_no_utf_8_stay_readable():
    name = os.fsdecode(b"caf\xe9.safetensors")
    assert json.loads(as_text(json.dumps({"model": name}, ensure_ascii=False))) == {"model": name}
