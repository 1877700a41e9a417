"""The command line: selects the command and reports errors in one sentence, without a traceback."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from ..errors import UserError, unknown
from ..memory import out_of_memory
from .machine import pack_version

# The console script of an installed pack, and what a checkout has without it.
SCRIPT = "fastar"
MODULE = "python -m fastar_nodes"

# Command: (module, help). A module has `arguments(parser)` and `run(options) -> exit code`.
Commands = Mapping[str, tuple[str, str]]
COMMANDS: Commands = {
    "list": (".listing", "list the models of the catalogue: size, licence, and whether they are on this computer"),
    "download": (".download", "download models of the catalogue, with everything that they need to generate images"),
    "compare": (".compare", "run samplers with the same seed and save their images side by side, with their numbers"),
    "bench": (".bench", "measure the speed of samplers, which take turns in one run"),
    "check": (
        ".check",
        "check a model's files, memory and speed on this machine, and write the results to a file for an issue",
    ),
    "advise": (".advise", "find the fastest sampler whose images stay close enough, on this machine"),
    "verify": (".verify", "verify with your own model that the methods are exact at their exact settings"),
}
LAB = "Sweeps, evaluation, training and other measurements are commands of python -m fastar_nodes.lab, in a checkout."


@dataclass(frozen=True)
class Program:
    """A program with commands: the pack's, and the lab's."""

    name: str  # as it is typed
    about: str  # the first lines of its help
    groups: Mapping[str, Commands]  # by headings; "" for no heading
    package: str  # that the modules of its commands are relative to
    elsewhere: str = ""  # a sentence after the refusal of an unknown command

    @property
    def commands(self) -> dict[str, tuple[str, str]]:
        """The commands of all groups."""
        return {name: command for group in self.groups.values() for name, command in group.items()}

    def parser(self, name: str) -> Parser:
        """The parser of a command's options."""
        module = self.module(name)
        parser = Parser(
            f"{self.name} {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(parser)
        return parser

    def module(self, name: str) -> Any:
        """The module of a command."""
        return importlib.import_module(self.commands[name][0], self.package)


class Parser(argparse.ArgumentParser):
    """ArgumentParser that reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the pack; see :func:`run`."""
    name = SCRIPT if PurePath(sys.argv[0]).stem == SCRIPT else MODULE
    return run(Program(name, "FastAR without ComfyUI.", {"": COMMANDS}, __package__, LAB), argv)


def run(program: Program, argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        program: whose command it is.
        argv: the command and its options; None for those of this process.

    Returns:
        The exit code: 0 success, 1 a check failed, 2 bad input, 130 interrupted, 141 the reader of the output has gone.
    """
    _open_streams()

    try:
        try:
            return _command(program, list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a closed pipe is no traceback
    except BrokenPipeError:
        # The reader closed the pipe. Without another stream, Python reports the error again at exit.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

        return 141


def _open_streams() -> None:
    """Give this process an output and an error stream that take any text.

    A service may start it without them, and in a locale without UTF-8 the name of a file may have characters that they
    cannot write.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)

        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _command(program: Program, args: list[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        if not args or args[0].startswith("-"):
            _top(program).parse_args(args[:1])

        name = args[0]
        if name not in program.commands:
            refused = unknown("command", f"there is no command {name[:60]!r}", name, program.commands)
            raise UserError(f"{refused} {program.elsewhere}".strip())

        options = program.parser(name).parse_args(args[1:])
        return int(program.module(name).run(options))
    except UserError as e:
        return _say(str(e))
    except BrokenPipeError:
        raise
    except OSError as e:
        return _say(f"{e.filename}: {e.strerror}" if e.filename and e.strerror else str(e))
    except (MemoryError, RuntimeError) as e:
        if not out_of_memory(e):
            raise
        return _say(
            "memory: there is not enough memory; ask for fewer images (--batch), or choose a different --device"
        )
    except KeyboardInterrupt:
        _say("stopped")
        return 130


def _top(program: Program) -> Parser:
    """The parser of the first argument: a command, or an option of the whole program."""
    lines = [program.about]
    for heading, commands in program.groups.items():
        lines += ["", heading or "Commands:"]
        width = max(14, *(len(name) + 2 for name in commands))
        lines += [f"  {name:<{width}}{about}" for name, (_, about) in commands.items()]
    lines += ["", "Each command has its own --help.", program.elsewhere]

    parser = Parser(program.name, description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"FastAR {pack_version()}")
    parser.add_argument("command", metavar="command", help="one of the above")

    return parser


def _say(sentence: str) -> int:
    """Print a sentence to stderr, if anybody reads it, and return the exit code of bad input."""
    if not sentence.endswith((".", "!", "?")):
        sentence = f"{sentence}."

    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)

    return 2
