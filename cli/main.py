"""Which command; and what a person reads when something is wrong: one sentence, never a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import UserError

PROGRAM = "python -m fastar_nodes"

# Command to (module, one line of help). A module has `arguments(parser)` and `run(options) -> exit code`.
COMMANDS = {
    "compare": (".compare", "run samplers on the same seed and draw their pictures side by side, with their numbers"),
    "bench": (".bench", "time samplers against each other in one interleaved run"),
    "verify": ("..tools.parity.command", "check this code against recorded results of the reference implementations"),
    "ablation": (
        "..tools.ablations.command",
        "judge the demo's pictures under a table of settings (docs/benchmarks.md)",
    ),
    "train-demo": ("..tools.training.command", "train the built-in demo checkpoints again"),
}


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: command and arguments; None for the process's own.

    Returns:
        The exit code: 0 done, 1 a check failed, 2 bad input, 130 stopped.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    lines = "\n".join(f"  {name:<12}{help}" for name, (_, help) in COMMANDS.items())
    top = Parser(
        PROGRAM,
        description=f"FastAR without ComfyUI. Commands:\n{lines}\n\nEach has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("command", choices=list(COMMANDS), metavar="command", help="one of the above")
    try:
        name = top.parse_args(args[:1]).command
        module = importlib.import_module(COMMANDS[name][0], __package__)
        parser = Parser(
            f"{PROGRAM} {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(parser)
        return int(module.run(parser.parse_args(args[1:])))
    except UserError as e:
        return _say(str(e))
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:
        return _say(f"{e.filename}: {e.strerror}" if e.filename and e.strerror else str(e))
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "out of memory" not in str(e).lower():
            raise
        return _say("memory: there is not enough of it; ask for fewer images (--batch), or choose another --device")
    except KeyboardInterrupt:
        _say("stopped")
        return 130


def _say(sentence: str) -> int:
    """One sentence on stderr; returns the exit code of bad input."""
    print(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}.", file=sys.stderr)
    return 2
