"""Check this code against results recorded from the reference implementations.

DIR is laid out like tests/parity: one folder a family (mar, llamagen, tar), or one family's files. Every case gets a
line: name, largest absolute error, tolerance, and ok, FAIL or "not yet" (recorded, but this version does not have the
sampler). Exit code 0 if nothing failed, 1 if something did, 2 if the folder cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ...errors import UserError
from .cases import Case, judge

# Files that only Tar's folder holds: its tokenizer's case has the name of LlamaGen's.
TAR = (
    "ar_tiny_*.safetensors",
    "mulosd_geometry.json",
    "tatok_*.safetensors",
    "simvq_*.safetensors",
    "full_size_shapes.json",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder of recorded cases")


def collect(root: Path) -> list[Case]:
    """The cases of a folder, or of the family folders in it.

    Raises:
        UserError: no such folder, or one without a case that is known here.
    """
    from . import llamagen as parity_llamagen
    from . import mar as parity_mar
    from . import mulosd as parity_mulosd
    from . import tar as parity_tar
    from . import vq as parity_vq

    if not root.is_dir():
        what = "no folder" if root.exists() else "not there"
        raise UserError(f"DIR: {root} is {what}; name a folder of recorded cases.")
    out: list[Case] = []
    for folder in [root, *sorted(p for p in root.iterdir() if p.is_dir())]:
        if any(next(folder.glob(mark), None) for mark in TAR):
            out += parity_tar.cases(folder)
        else:
            out += parity_mar.cases(folder) + parity_llamagen.cases(folder) + parity_vq.cases(folder)
        out += parity_mulosd.cases(folder)
    if not out:
        raise UserError(f"DIR: {root} holds no parity case known here; name a folder laid out like tests/parity.")
    return out


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Print a line a case."""
    failed = counted = 0
    for case in collect(options.dir):
        outcome = judge(case)
        print(outcome.line, flush=True)
        if outcome.why:
            print(f"  {outcome.name}: {outcome.why}", file=sys.stderr)
        failed += outcome.verdict == "FAIL"
        counted += outcome.verdict != "not yet"
    print(f"{counted} cases run, {failed} failed", file=sys.stderr)
    return int(failed > 0)
