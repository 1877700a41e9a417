"""Compare this code with recorded results of the reference implementations.

DIR has the layout of tests/parity: one folder per family (mar, llamagen, tar, vq, harmon, unipic, janus, janus_images,
bitdance, nextstep), or the files of one family. Every case prints a line: name, largest absolute error, tolerance, and
ok, FAIL or "not yet" (recorded, but not implemented in this version). Exit code 0 if no case failed, 1 if one did, 2 if
the folder cannot be read.
"""

import argparse
import sys
from pathlib import Path

import torch

from ...errors import UserError
from ...reports.files import typed_path
from .cases import Case, judge

# Files that identify Tar's folder: its VQ files have the names of LlamaGen's.
TAR = (
    "ar_tiny_*.safetensors",
    "mulosd_geometry.json",
    "tatok_*.safetensors",
    "simvq_*.safetensors",
    "full_size_shapes.json",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("dir", metavar="DIR", help="a folder of recorded cases")


def collect(root: Path) -> list[Case]:
    """The cases of a folder, or of the family folders in it. Raises UserError if there is none."""
    from . import bitdance, hybrid, janus, janus_images, llamagen, mar, mulosd, nextstep, tar, vq

    if not root.is_dir():
        what = "not a folder" if root.exists() else "missing"
        raise UserError(f"DIR: {root} is {what}; give a folder of recorded cases.")

    out: list[Case] = []

    for folder in [root, *sorted(p for p in root.iterdir() if p.is_dir())]:
        if any(next(folder.glob(mark), None) for mark in TAR):
            out += tar.cases(folder)
        else:
            out += mar.cases(folder) + llamagen.cases(folder) + vq.cases(folder)
        out += mulosd.cases(folder) + hybrid.cases(folder) + bitdance.cases(folder)
        out += janus.cases(folder) + janus_images.cases(folder) + nextstep.cases(folder)

    if not out:
        raise UserError(
            f"DIR: {root} has no parity case that FastAR knows; give a folder with the layout of tests/parity."
        )

    return out


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Run all cases and print one line each."""
    failed = counted = 0
    for case in collect(typed_path(options.dir, "DIR")):
        outcome = judge(case)
        print(outcome.line, flush=True)
        if outcome.why:
            print(f"  {outcome.name}: {outcome.why}", file=sys.stderr)
        failed += outcome.verdict == "FAIL"
        counted += outcome.verdict != "not yet"

    print(f"{counted} cases run, {failed} failed", file=sys.stderr)
    return int(failed > 0)
