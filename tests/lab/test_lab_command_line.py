"""The lab's command line: its commands, their options, and bad input before anything runs."""

import re

import pytest
from fastar_nodes.cli import main
from fastar_nodes.lab.commands import PROGRAM

PACK = main.Program("pack", "", {"": main.COMMANDS}, "fastar_nodes.cli")
EVERY = [(program, name) for program in (PACK, PROGRAM) for name in program.commands]


@pytest.mark.parametrize(("program", "name"), EVERY, ids=lambda value: getattr(value, "name", value))
def test_options_are_spelt_one_way(program, name):
    """In small letters with hyphens, and each under one name."""
    for action in program.parser(name)._actions:
        names = [option for option in action.option_strings if option not in ("-h", "--help")]
        assert len(names) <= 1, names
        for option in names:
            assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", option)


PATHS = {
    "sweep": "spec",
    "evaluate": "folder",
    "plot": "folder",
    "train-demo --only kl --device cpu --out": "out",
    "train-demo --only kl --device cpu --work": "work",
}


@pytest.mark.parametrize("line", PATHS)
def test_the_home_of_an_unknown_user_is_named_in_every_path(lab, sentence, tmp_path, line):
    text = sentence(lab(line, "~nosuchuser/x"))
    assert text.startswith(f"{PATHS[line]}: the home folder in ~nosuchuser/x is unknown"), text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "plot nosuch --out a/b/x.png",
        "sweep nosuch.toml --out a/b",
        "train-demo --only kl,judge --device abacus --work a/b --out c/d",
        "train-demo --only kl --device cpu --work a/b --out file",
    ],
)
def test_a_command_that_is_refused_leaves_no_folder(lab, sentence, tmp_path, line):
    (tmp_path / "file").touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert sentence(lab(line))
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["x", "-5", "1000000", ""])
def test_threads_that_no_machine_has(lab, sentence, text):
    assert sentence(lab("sweep", "none.json", "--threads", text)).startswith("threads: ")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", ""], ids=["lists", "objects", "open", "empty"])
def test_deep_json_is_no_spec_and_no_manifest(lab, sentence, tmp_path, text):
    (tmp_path / "spec.json").write_text(text)
    assert sentence(lab("sweep spec.json --out new")).startswith("spec: spec.json cannot be parsed")
    (tmp_path / "manifest.json").write_text(text)
    for command in ("evaluate", "plot"):
        assert "manifest.json" in sentence(lab(command, tmp_path))
