"""The command lines of the pack and of the lab as functions, in fixtures of the tests of commands."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fastar_nodes.cli.main import main
from fastar_nodes.lab import commands


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command line, and arguments behind it, in an empty folder; its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return as_function(main, capsys)


@pytest.fixture
def lab(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The same for the lab's command line."""
    monkeypatch.chdir(tmp_path)
    return as_function(commands.main, capsys)


def as_function(program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> Cli:
    """A program as a function of its command line."""

    def run(line: str = "", *more: object) -> Answer:
        try:
            code = program([*shlex.split(line), *map(str, more)])
        except SystemExit as e:  # raised by argparse
            code = e.code
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def sentence() -> Callable[[Answer], str]:
    """The message on bad input: exit code 2, one line, no traceback, nothing on stdout."""

    def one_sentence(answer: Answer) -> str:
        assert answer.code == 2 and answer.out == "" and "Traceback" not in answer.err, answer
        lines = answer.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].endswith((".", "!", "?")), answer.err
        return lines[0]

    return one_sentence
