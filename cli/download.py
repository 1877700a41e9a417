"""Download models of the catalogue with all that they need to draw: decoder, tokenizer, and what reads their prompts.

Afterwards they draw without a network. What is here already is not downloaded again, and an interrupted download goes
on. The command list prints the names; a draft model is a name of its own.
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..runs.loading import AUTO, ENCODER, find_file, models_folder
from .options import models_option
from .subject import expect_disk, needed, subject


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="an entry of the catalogue, such as mar-base")
    models_option(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    folder = models_folder(options.models)

    files: list[tuple[str, str]] = []
    for name in options.names:
        what = subject(name, options.models)
        if what.entry is None:
            raise UserError(
                f"download: {what.name} is a file on this computer, so there is nothing to download; name "
                "a model from FastAR's catalogue, for example mar-base."
            )
        files += needed(what, AUTO, AUTO, AUTO, ENCODER, prompts=True)

    files = list(dict.fromkeys(files))
    expect_disk(files, folder)
    for choice, kind in files:
        print(f"{choice}: {find_file(choice, kind, folder)}", flush=True)
    return 0
