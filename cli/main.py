"""The command line: selects the command and reports errors in one sentence, without a traceback."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, NoReturn

from ..errors import UserError
from ..memory import out_of_memory
from .machine import pack_version

# The console script of an installed pack, and what a checkout has without it.
SCRIPT = "fastar"
MODULE = "python -m fastar_nodes"

# Command: (module, help). A module has `arguments(parser)` and `run(options) -> exit code`.
# lab/ is a folder of a checkout: the installed pack does not offer its commands.
COMMANDS = {
    "list": (".listing", "list the models of the catalogue: size, licence, and whether they are here"),
    "download": (".download", "download models of the catalogue with all that they need to draw"),
    "compare": (".compare", "run samplers with one seed and save their images side by side, with figures"),
    "bench": (".bench", "time samplers against each other in one interleaved run"),
    "evaluate": ("..lab.sweeps.evaluate", "measure the images of a sweep: PSNR, SSIM, FID and others, with intervals"),
    "table": ("..lab.sweeps.table", "print speed, work and quality of every cell of a sweep"),
    "plot": ("..lab.sweeps.plot", "draw speed-up against quality of a sweep, with its Pareto front"),
    "check": (".check", "check a model's files, memory and seconds on this machine, and write a file for an issue"),
    "advise": (".advise", "find the fastest sampler whose images stay close enough, on this machine"),
    "sweep": ("..lab.sweeps.sweep", "draw many images of every sampler and setting, on any number of workers"),
    "against": ("..lab.experiments.against", "time reference implementations beside ours, from checkouts of them"),
    "probe": ("..lab.experiments.probe", "decode all undecided tokens of a MAR at once after some AR steps"),
    "operations": ("..lab.work.operations", "count the operations of samplers and the minimum time for them"),
    "presets": ("..lab.work.preset_work", "calls, rows and operations of the presets of full-size models"),
    "equal": (
        "..lab.experiments.equal",
        "count the images of parallel decoding that equal serial decoding's, by dtype",
    ),
    "dtypes": ("..lab.experiments.dtypes", "compare the images of a model in several dtypes"),
    "fits": ("..lab.work.fits", "print the GPU memory that every model needs, in 16 and in 8 bits"),
    "gpu": ("..lab.gpu", "measure all samplers on a GPU with each speed, and print a table"),
    "verify": ("..lab.parity.command", "compare this code with recorded results of the reference implementations"),
    "train-demo": ("..lab.training.command", "train the built-in demo checkpoints"),
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser that reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 success, 1 a check failed, 2 bad input, 130 interrupted, 141 the reader of the output has gone.
    """
    _open_streams()

    try:
        try:
            return _command(list(sys.argv[1:] if argv is None else argv))
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


def _command(args: list[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        name = args[0] if args and args[0] in COMMANDS else _top().parse_args(args[:1]).command
        module = load_module(COMMANDS[name][0], f"{name}: this command")

        parser = Parser(
            f"{_program()} {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(parser)
        return int(module.run(parser.parse_args(args[1:])))
    except UserError as e:
        return _say(str(e))
    except BrokenPipeError:
        raise
    except OSError as e:
        return _say(f"{e.filename}: {e.strerror}" if e.filename and e.strerror else str(e))
    except (MemoryError, RuntimeError) as e:
        if not out_of_memory(e):
            raise
        return _say("memory: there is not enough; ask for fewer images (--batch), or choose another --device")
    except KeyboardInterrupt:
        _say("stopped")
        return 130


def _top() -> Parser:
    """The parser of the first argument, which names the command."""
    offered = {name: about for name, (module, about) in COMMANDS.items() if is_here(module)}
    lines = "\n".join(f"  {name:<12}{about}" for name, about in offered.items())

    parser = Parser(
        _program(),
        description=f"FastAR without ComfyUI. Commands:\n{lines}\n\nEach has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"FastAR {pack_version()}")
    parser.add_argument("command", choices=list(offered), metavar="command", help="one of the above")

    return parser


def _program() -> str:
    """How the user started the command line."""
    return SCRIPT if PurePath(sys.argv[0]).stem == SCRIPT else MODULE


def is_here(module: str) -> bool:
    """Whether this installation contains the folder of a module: lab/ is in a checkout only."""
    folder = module.split(".")[2] if module.startswith("..") else ""
    return not folder or find_spec(f"..{folder}", __package__) is not None


def load_judge() -> Any:
    """The demo's judge; a UserError if this installation does not contain it, or its file is missing."""
    return load_module("..lab.sweeps.judging", "judge: the demo's judge").PictureBookJudge()


def load_module(name: str, what: str) -> Any:
    """A module by its name.

    Raises:
        UserError: it is of a folder that this installation does not contain; the message names ``what`` needs it.
    """
    if not is_here(name):
        folder = name.split(".")[2]
        raise UserError(
            f"{what} needs a checkout of the FastAR repository; the installed pack does not contain {folder}/"
        )

    return importlib.import_module(name, __package__)


def _say(sentence: str) -> int:
    """Print a sentence to stderr, if anybody reads it, and return the exit code of bad input."""
    if not sentence.endswith((".", "!", "?")):
        sentence = f"{sentence}."

    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)

    return 2
