"""Draw the curve of a sweep: speed-up against quality of every cell with 95 % intervals, one curve a sampler, the Pareto front ringed.

The figures come from the command evaluate. A CSV file with all of them is written beside the plot, and a contact sheet with the same
six pictures of every cell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from ..errors import UserError
from ..reports.values import parse_values
from ..scale.curve import AUTO, CALLS, SECONDS, curve, to_csv
from ..scale.curve_pictures import INDICES, cell_sheet, curve_plot, note, title_of
from ..scale.store import Store
from .compare import PICTURES
from .options import output, save, whole

_MOST_IMAGES = 10_000_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", help="folder or fsspec address of a sweep that was evaluated")
    parser.add_argument(
        "--measure",
        metavar="NAME",
        help="what the speed-up is plotted against: a measure of the command evaluate; default FID, else a Frechet distance, the judge's "
        "scene or PSNR",
    )
    parser.add_argument(
        "--against",
        default=AUTO,
        choices=(AUTO, SECONDS, CALLS),
        help=f"vertical axis: {SECONDS}, the measured speed-up, or {CALLS}, sequential calls; default {AUTO}: seconds if every cell was "
        "timed",
    )
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="the plot; default curve.png")
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="the contact sheet; default the plot's name with -sheet"
    )
    parser.add_argument(
        "--indices",
        default=", ".join(map(str, INDICES)),
        metavar="N,N,...",
        help="images of the contact sheet; default the first six",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    out = output(options.out, "out", PICTURES)
    assert out is not None
    sheet = output(options.sheet or out.with_name(f"{out.stem}-sheet{out.suffix}"), "sheet", PICTURES)
    assert sheet is not None
    indices = [
        whole(value, "indices", 0, _MOST_IMAGES) for value in parse_values(options.indices, "indices", whole=True)
    ]
    store = Store(options.folder)
    found = curve(store, options.measure, options.against)
    numbers = out.with_suffix(".csv")
    if numbers.is_dir():
        raise UserError(f"out: {numbers} is a folder; give another name.")
    plot = curve_plot(found, title_of(store, found))
    pictures = cell_sheet(store, indices)
    save(out, Image.fromarray(plot).save)
    save(numbers, lambda part: part.write_text(to_csv(found), encoding="utf-8"))
    save(sheet, Image.fromarray(pictures).save)
    if remark := note(found):
        print(f"note: {remark}")
    print(f"plot: {out}\nnumbers: {numbers}\ncontact sheet: {sheet}")
    return 0
