"""Make pictures of the demo under a table of settings and judge them: the figures of docs/benchmarks.md.

Tables: {tables}. Every row uses the same seeds and labels, or prompts. Quality figures are explained in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...cli.options import choose_device, output, whole
from ...reports.drawing import contact_sheet
from .mar import MARBench
from .mulosd import LlamaGenRepairBench
from .tables import Bench, Ground, bench_of, run_table, to_markdown
from .tar import TarBench, TarRepairBench
from .tokens import TokenBench

BENCHES: tuple[type[Bench], ...] = (MARBench, TokenBench, LlamaGenRepairBench, TarBench, TarRepairBench)
__doc__ = (__doc__ or "").format(tables=", ".join(name for kind in BENCHES for name in kind.tables))

MOST = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("tables", help="which tables, separated by commas")
    parser.add_argument("--images", default="1000", metavar="N", help="pictures of every row; default 1000")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="weights of the models; default fp32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="draw the first 10 pictures of every row, a line a row, all tables"
    )


def run(options: argparse.Namespace) -> int:
    """Make, judge and print the tables."""
    images = whole(options.images, "images", 100, MOST)
    out, sheet = output(options.out, "out", (".json",)), output(options.sheet, "sheet", (".png", ".jpg"))
    names = [name.strip() for name in options.tables.split(",")]
    kinds = [bench_of(name, BENCHES) for name in names]
    device, ground = str(choose_device(options.device)), Ground(images)
    made = {kind: kind(ground, device, options.dtype) for kind in dict.fromkeys(kinds)}
    benches = [made[kind] for kind in kinds]
    for name, bench in zip(names, benches, strict=True):
        bench.expect(name)  # mistakes are told before anything is drawn
    lines: list[np.ndarray] = []
    told: dict[str, Any] = {"images": images, "floors": {}, "tables": {}}
    for name, bench in zip(names, benches, strict=True):
        floors = bench.floors(name)
        results = run_table(bench, name, log=lambda text: print(text, flush=True), keep=lines)
        print(f"{name}:\n\n{to_markdown(results, floors)}\n", flush=True)
        told["floors"].update({k: asdict(v) for k, v in floors.items()})
        told["tables"][name] = [asdict(r) for r in results]
        if out:
            out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if sheet:
        Image.fromarray(contact_sheet(np.concatenate(lines), 10)).save(sheet)
    return 0
