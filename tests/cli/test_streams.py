"""The command line with streams that nobody reads, without a home or current folder, and with names
of other locales.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fastar_nodes.cli import bench, compare, main, options, progress
from fastar_nodes.reports import files

LINE = "compare --samplers mar --device cpu --set steps=2 --set diffusion_steps=2"


class Closed(io.StringIO):
    """A stream whose reader goes."""

    gone = True

    def write(self, text=""):
        if self.gone:
            raise BrokenPipeError

    flush = write

    def isatty(self):
        return False


def flushed(*_):
    raise BrokenPipeError


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr(compare, "run", lambda options: print("a table") or 0)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main.main(["compare"]) == 141 and capsys.readouterr().err == ""


def test_head_takes_one_line_of_a_real_process(tmp_path):
    """The help is longer than what head reads; Python would report the closed pipe at exit."""
    command = [sys.executable, "-m", "fastar_nodes", "--help"]
    read, write = os.pipe()
    os.close(read)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=buffered, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_results_are_written_before_the_table_that_nobody_reads(cli, tiny_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "to_table", flushed)
    assert cli(f"{LINE} --json c.json").code == 141
    assert (tmp_path / "compare.png").is_file() and (tmp_path / "c.json").is_file()


def test_a_progress_bar_that_nobody_reads_does_not_end_the_run(monkeypatch):
    stream = Closed()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Bar("never read") as bar:
        bar(1, 4, "AR steps")
    stream.gone = False
    with progress.Bar("MAR") as bar:
        stream.gone = True
        bar.start_t -= 20
        bar.last_print_t -= 20
        bar(1, 4, "AR steps")
        bar(2, 4, "AR steps")
    assert bar.disable


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_process_without_streams_runs(monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(compare, "run", lambda options: print("a table") or print("progress", file=sys.stderr) or 0)
    assert main.main(["compare"]) == 0
    assert main.main(["bench", "--batch", "x"]) == 2


def test_a_sentence_that_nobody_reads_keeps_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Closed())
    assert main.main(["bench", "--batch", "x"]) == 2


def test_names_of_another_locale_are_printed(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(compare, "run", lambda options: print(f"caf\xe9 {os.fsdecode(bytes([0xE9]))}") or 0)
    assert main.main(["compare"]) == 0
    assert (
        out.buffer.getvalue().split(os.linesep.encode())[0] == b"caf\\xe9 " + ascii(os.fsdecode(b"\xe9"))[1:-1].encode()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes are Linux's")
def test_a_file_whose_name_is_no_utf_8(cli, tiny_demo, files, sentence, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    answer = cli(LINE, "--out", f"{name}.png", "--json", f"{name}.json", "--label", "boat")
    assert answer.code == 0, answer.err
    assert (tmp_path / f"{name}.png").is_file() and (tmp_path / f"{name}.json").is_file()
    shutil.copy(files.mar, tmp_path / f"{name}.safetensors")
    text = sentence(cli(f"{LINE} --model", f"{name}.safetensors"))
    assert text.startswith("checkpoint: ") and "caf\\udce9.safetensors is not UTF-8" in text and "rename" in text


@pytest.fixture
def homeless(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)


def test_without_a_home_folder_the_demo_runs_and_downloads_are_refused(
    cli, tiny_demo, sentence, homeless, tmp_path, monkeypatch
):
    monkeypatch.setattr("socket.socket.connect", None)
    assert cli(LINE).code == 0
    text = sentence(cli("compare --device cpu --samplers mar --model mar-base"))
    assert text.startswith("models: mar-base ") and "home folder" in text and "--models" in text
    assert sentence(cli("compare --device cpu --model mine.pth")).startswith("checkpoint: ")
    assert options.models_folder("weights") == Path("weights"), "the remedy"


def test_without_a_current_folder_there_is_one_sentence(cli, tiny_demo, sentence, tmp_path, monkeypatch):
    if os.name != "posix":
        pytest.skip("the current folder cannot be removed here")
    gone, before = tmp_path / "gone", os.getcwd()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert sentence(cli(LINE)).startswith("out: compare.png cannot be written ")
        assert cli(LINE, "--out", tmp_path / "x.png").code == 0, "the remedy"
    finally:
        os.chdir(before)


PATHS = {
    "compare --device cpu --model": "checkpoint",
    "compare --device cpu --decoder": "decoder",
    "compare --device cpu --samplers mar,cspd --draft": "draft",
    "compare --device cpu --prompt cat --tar": "checkpoint",
    "compare --device cpu --models": "models",
    "compare --device cpu --out": "out",
    "compare --device cpu --maps": "maps",
    "compare --device cpu --json": "json",
    "bench --device cpu --json": "json",
    "verify --device cpu --model": "checkpoint",
    "verify --device cpu --models": "models",
}


@pytest.mark.fast_cases(every=3)
@pytest.mark.parametrize("line", PATHS)
def test_the_home_of_an_unknown_user_is_named_in_every_path(cli, tiny_demo, sentence, tmp_path, line):
    ending = {"out": ".png", "maps": ".png", "json": ".json"}.get(PATHS[line], "")
    text = sentence(cli(line, f"~nosuchuser/x{ending}"))
    assert text.startswith(f"{PATHS[line]}: the home folder in ~nosuchuser/x{ending} is unknown"), text
    assert not list(tmp_path.iterdir())


def test_a_full_disk_after_the_run_keeps_the_results(cli, tiny_demo, tmp_path, monkeypatch):
    """The disk of the outputs fills while the sampler runs; the table is printed all the same."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(kept))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    answer = cli(f"{LINE} --json c.json --maps m.png")
    (folder,) = kept.iterdir()
    assert answer.code == 2 and answer.out.startswith("| sampler")
    assert answer.err == (
        "out (compare.png), maps (m.png), json (c.json): could not be written (No space left on device); "
        f"saved in {folder} instead.\n"
    )
    assert sorted(p.name for p in folder.iterdir()) == ["c.json", "compare.png", "m.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"]
    answer = cli("bench --samplers mar --device cpu --repeats 1 --set steps=2 --set diffusion_steps=2 --json t.json")
    assert answer.code == 2 and "| batch" in answer.out and answer.err.startswith("json (t.json): could not be written")
    assert bench.VERSION == 1


def test_outputs_are_tested_before_anything_is_loaded(cli, sentence, tmp_path, monkeypatch):
    for module in (compare, bench):
        monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("nothing should be loaded"))
    (tmp_path / "file").touch()
    for line in ("--out file/x.png", "--maps file/x.png", "--json file/x.json", "--out x.png --maps ./x.png"):
        assert sentence(cli(f"compare {line}")).startswith(("out: ", "maps: ", "json: "))
    assert sentence(cli("bench --json file/x.json")).startswith("json: file/x.json cannot be written")


@pytest.mark.parametrize(
    "line",
    [
        "compare --model nosuch --out a/b/x.png --maps a/c/m.png --json d/x.json",
        "compare --samplers mar --label nosuch --device cpu --out a/b/x.png --maps a/c/m.png --json d/x.json",
        "bench --model nosuch --json a/b/x.json",
        "check --model nosuch --out a/b/x.png --json c/x.json",
        "check --model demo --device abacus --out a/b/x.png --json c/x.json",
    ],
)
def test_a_command_that_is_refused_leaves_no_folder(cli, sentence, tiny_demo, tmp_path, line):
    (tmp_path / "file").touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert sentence(cli(line))
    assert {path.name for path in tmp_path.iterdir()} == before
