"""The commands list and download, the program's name and version, and the spelling of all options."""

import sys
from importlib import import_module

import fastar_nodes
import pytest
from fastar_nodes import UserError
from fastar_nodes.cli import subject
from fastar_nodes.cli.machine import pack_version
from fastar_nodes.model_loaders.catalogue import hub

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def fetched(monkeypatch):
    """Downloads write the name of the file in place of its content; gives the names that were asked for."""
    asked = []

    def download(remote, path, field, report):
        asked.append(remote.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(remote.name)

    monkeypatch.setattr(hub, "download", download)
    return asked


def rows(answer):
    """The table of ``list``: name to its other cells."""
    assert answer.code == 0, answer.err
    lines = [line for line in answer.out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["name", "what", "download", "licence", "where"]
    return {name: other for name, *other in cells[2:]}


def test_the_console_script_is_the_command_line(root, capsys, monkeypatch):
    """What an installed pack offers under the name of pyproject.toml is what ``python -m`` runs, under its own name."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, place),) = project["scripts"].items()
    module, function = place.split(":")
    run = getattr(import_module(module), function)

    for started, said in ((f"/usr/bin/{name}", "fastar"), ("__main__.py", "python -m fastar_nodes")):
        monkeypatch.setattr(sys, "argv", [started, "compare", "--nosuch"])
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"{said} compare: unrecognized arguments: --nosuch")


def test_version(cli, root):
    answer = cli("--version")
    assert (answer.code, answer.out) == (0, f"FastAR {pack_version()}\n")
    assert f'version = "{pack_version()}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_list_shows_every_entry_and_whether_it_is_here(cli, fetched, tmp_path):
    before = rows(cli("list", "--models", tmp_path))
    assert {*before} == {entry.id for entry in subject.all_entries()}
    assert before["demo"] == ["MAR", "", "MIT", "built in"]
    assert before["kl16"] == ["KL autoencoder", "266 MB", "MIT", ""]
    assert before["harmon-0.5b"][0] == "Harmon or UniPic (non-commercial)"
    assert before["ta-tok"][1].startswith("up to ")

    assert cli("download", "kl16", "--models", tmp_path).code == 0
    after = rows(cli("list", "--models", tmp_path))
    assert {name for name in after if after[name] != before[name]} == {"kl16"} and after["kl16"][-1] == "here"


def test_download_gets_what_drawing_needs_once(cli, fetched, tmp_path):
    answer = cli("download", "mar-base", "kl16", "--models", tmp_path)
    assert answer.code == 0, answer.err
    assert fetched == ["mar-base.safetensors", "kl16.safetensors"]
    assert answer.out.splitlines() == [f"{name}: {tmp_path / f'{name}.safetensors'}" for name in ("mar-base", "kl16")]

    assert cli("download", "mar-base", "--models", tmp_path).out == answer.out
    assert len(fetched) == 2, "what is here is not downloaded again"

    assert cli("download", "demo-dtok", "--models", tmp_path).code == 0
    assert len(fetched) == 2, "what comes with the pack"


def test_download_asks_for_room_first(cli, fetched, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "free_space", lambda folder: 1_000_000_000)
    said = sentence(cli("download", "mar-base", "mar-huge", "--models", tmp_path))
    assert said.startswith("models: the downloads of mar-base, kl16, mar-huge need 4.87 GB, but only 1.00 GB are free")
    assert not fetched


def test_a_file_is_no_download(cli, files, sentence):
    said = sentence(cli("download", files.mar))
    assert said.startswith("download: mar.safetensors is a file")


# Of several families: the suggestion must not depend on the one that is tried first.
MISTYPED = {"mar-bass": "mar-base", "demo-hybird": "demo-hybrid", "janus-pro-1": "janus-pro-1b", "dem-par": "demo-par"}


@pytest.mark.parametrize(("typed", "meant"), MISTYPED.items())
def test_a_mistyped_model_gets_the_same_sentence_everywhere(cli, sentence, fetched, tmp_path, typed, meant):
    expected = f"checkpoint: '{typed}' is not in {tmp_path}; did you mean {meant}?"
    for command in ("check --model", "compare --device cpu --model", "bench --device cpu --model", "download"):
        assert sentence(cli(f"{command} {typed} --models {tmp_path.as_posix()}")) == expected, command

    with pytest.raises(UserError) as error:
        fastar_nodes.load(typed, models=tmp_path, device="cpu")
    assert str(error.value) == expected
    assert not fetched
