"""Compare the demo with weights of 8 bits with the demo in fp32: bytes, and images of the same seed.

``python -m fastar_nodes.tools.ablations.eight_bits`` prints the table of docs/benchmarks/eight_bits.md. Every row is
sampled with the settings of its checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...cli.options import SEEDS, whole
from ...reports.quality import psnr
from ...reports.table import markdown
from ..training.quality import Figures
from .hybrid import HybridBench
from .mar import MARBench
from .tables import Bench, Ground, Row
from .tar import TarBench
from .tokens import TokenBench

# The benches, and how many of the first rows of their tables are compared.
_ROWS: dict[str, tuple[type[Bench], int]] = {
    "llamagen": (TokenBench, 3),
    "tar": (TarBench, 1),
    "mar": (MARBench, 1),
    "hybrid": (HybridBench, 1),
}
_TITLES = {"hybrid": "hybrid, as Harmon", "tar": "Tar, all codes, 8 x 8"}
DTYPES = ("fp32", "int8", "fp8")
_BATCH = 100


@dataclass
class Made:
    """What a dtype made of a row."""

    bytes: int
    images: np.ndarray  # uint8 [N, S, S, 3]
    figures: Figures
    codes: list[Tensor] = field(default_factory=list)  # of token models


@torch.no_grad()
def made(kind: type[Bench], row: Row, dtype: str, ground: Ground) -> Made:
    """Sample a row in a dtype."""
    bench: Any = kind(ground, "cpu", dtype, _BATCH)
    if isinstance(bench, MARBench):
        networks = [*bench.mar.parts.values()]
    else:
        networks = [bench.model(row.model).net]
    if isinstance(bench, TarBench):
        networks.append(bench.language.net)

    codes: list[Tensor] = []
    if isinstance(bench, TokenBench):
        decode = bench.decode

        def kept(found: Tensor) -> np.ndarray:
            codes.append(found)
            return decode(found)

        bench.decode = kept  # type: ignore[method-assign, assignment]

    rgb, _ = bench.pictures(row, bench.settings(row, bench.common))
    size = sum(parameter.nbytes for net in networks for parameter in net.parameters())
    return Made(bytes=size, images=rgb, figures=bench.ground.figures(rgb), codes=codes)


def cells(found: Made, baseline: Made) -> dict[str, str]:
    """A row of the table."""
    quality = found.figures.cells()
    equal = ""
    if found.codes and found is not baseline:
        same = torch.cat(found.codes) == torch.cat(baseline.codes)
        equal = f"{100 * same.float().mean().item():.1f}"

    return {
        "MB": f"{found.bytes / 1e6:.2f}",
        "PSNR, dB": "" if found is baseline else f"{psnr(found.images, baseline.images):.1f}",
        "equal tokens %": equal,
        "class, or all attributes %": quality.get("class %", quality.get("all %", "")),
        "scene %": quality.get("scene %", ""),
        "whole %": quality["whole %"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Sample, compare and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastar_nodes.tools.ablations.eight_bits", description=__doc__)
    parser.add_argument("tables", nargs="*", choices=list(_ROWS), default=list(_ROWS), help="default all")
    parser.add_argument("--images", default="200", metavar="N", help="images of a row; default 200")
    parser.add_argument("--seed", default="470", metavar="N", help="sampling seed; default 470, which chose nothing")
    options = parser.parse_args(argv)
    ground = Ground(whole(options.images, "images", 100, 100_000), seed=whole(options.seed, "seed", 0, SEEDS - 1))

    table: list[list[str]] = []
    for name in options.tables:
        kind, count = _ROWS[name]
        for row in kind.tables[name][:count]:
            baseline = None
            for dtype in DTYPES:
                found = made(kind, row, dtype, ground)
                baseline = baseline or found
                shown = cells(found, baseline)
                if not table:
                    table.append(["demo", "weights", *shown])
                table.append([_TITLES.get(name, row.title), dtype, *shown.values()])
                print(*table[-1], sep="  ", file=sys.stderr, flush=True)

    print(markdown(table, empty=True, markup=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
