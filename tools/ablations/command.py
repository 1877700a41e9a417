"""Sample images of the demo under tables of settings and measure them: the figures of docs/benchmarks.md.

Tables: {tables}. All rows use the same seeds and labels, or prompts. docs/benchmarks.md defines the quality figures.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from ...cli.options import SEEDS, choose_device, whole
from ...errors import UserError
from ...reports.drawing import contact_sheet
from ...reports.files import Result, as_text, encoded, output, save
from .hybrid import HybridBench
from .mar import MARBench
from .mulosd import LlamaGenRepairBench
from .tables import BATCH, SEED, Bench, Ground, bench_of, run_table, to_markdown
from .tar import TarBench, TarRepairBench
from .tokens import TokenBench

BENCHES: tuple[type[Bench], ...] = (MARBench, HybridBench, TokenBench, LlamaGenRepairBench, TarBench, TarRepairBench)
__doc__ = (__doc__ or "").format(tables=", ".join(name for kind in BENCHES for name in kind.tables))

MAX_IMAGES = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("tables", help="names of tables, separated by commas")
    parser.add_argument("--images", default="1000", metavar="N", help="images per row; default 1000")
    chose = f"sampling seed; default {SEED}, which chose presets"
    parser.add_argument("--seed", default=str(SEED), metavar="N", help=chose)
    parser.add_argument("--batch", default=str(BATCH), metavar="N", help=f"images sampled at once; default {BATCH}")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")
    kinds = ("fp32", "bf16", "fp16", "int8", "fp8")
    parser.add_argument("--dtype", default="fp32", choices=kinds, help="weights of the models; default fp32")
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    drawn = "draw the first 10 images of every row of all tables, one line per row"
    parser.add_argument("--sheet", metavar="FILE", help=drawn)


def run(options: argparse.Namespace) -> int:
    """Compute and print the tables."""
    images = whole(options.images, "images", 100, MAX_IMAGES)
    seed, batch = whole(options.seed, "seed", 0, SEEDS - 1), whole(options.batch, "batch", 1, images)
    out, sheet = output(options.out, "out", (".json",)), output(options.sheet, "sheet", (".png", ".jpg"))
    names = [name.strip() for name in options.tables.split(",")]
    kinds = [bench_of(name, BENCHES) for name in names]
    device, ground = str(choose_device(options.device)), Ground(images, seed=seed)
    bench_by_kind = {kind: kind(ground, device, options.dtype, batch) for kind in dict.fromkeys(kinds)}
    benches = [bench_by_kind[kind] for kind in kinds]
    for name, bench in zip(names, benches, strict=True):
        bench.expect(name)  # report missing files before sampling
    lines: list[np.ndarray] = []
    record: dict[str, Any] = {"images": images, "seed": seed, "batch": batch, "floors": {}, "tables": {}}

    for name, bench in zip(names, benches, strict=True):
        floors = bench.floors(name)
        results = run_table(bench, name, log=lambda text: print(text, flush=True), keep=lines)
        print(f"{name}:\n\n{to_markdown(results, floors)}\n", flush=True)
        record["floors"].update({k: asdict(v) for k, v in floors.items()})
        record["tables"][name] = [asdict(r) for r in results]
        if out and (unsaved := save([Result("out", out, as_text(json.dumps(record, indent=1) + "\n"))])):
            raise UserError(unsaved)

    if sheet:
        drawn = encoded(contact_sheet(np.concatenate(lines), 10), sheet)
        if unsaved := save([Result("sheet", sheet, drawn)]):
            raise UserError(unsaved)

    return 0
