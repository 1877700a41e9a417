"""Draw the curve of a sweep: speed-up against quality of every cell with 95 % intervals, one curve a sampler, the Pareto front ringed.

The figures come from the command evaluate. A CSV file with all of them is written beside the plot, and a contact sheet with the same
pictures of every cell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli.options import output, save, whole
from ..errors import UserError
from ..reports.values import parse_values
from .curve import curve, to_csv
from .plots import INDICES, contact_sheet, curve_plot, save_figure
from .records import MOST_IMAGES
from .store import Store

_ENDINGS = (".png", ".jpg", ".pdf", ".svg")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", help="folder or fsspec address of a sweep that was evaluated")
    parser.add_argument(
        "--measure",
        metavar="NAME",
        help="a measure of the command evaluate; default FID, else a Frechet distance, the judge's scene or PSNR",
    )
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="the plot; default curve.png")
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="the contact sheet; default the plot's name with -sheet"
    )
    parser.add_argument(
        "--indices", default=", ".join(map(str, INDICES)), metavar="N,N,...", help="images of the contact sheet"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    out = output(options.out, "out", _ENDINGS)
    assert out is not None
    sheet = output(options.sheet or out.with_name(f"{out.stem}-sheet{out.suffix}"), "sheet", _ENDINGS)
    assert sheet is not None
    numbers = out.with_suffix(".csv")
    if numbers.is_dir():
        raise UserError(f"out: {numbers} is a folder; give another name.")
    texts = parse_values(options.indices, "indices", whole=True)
    indices = [whole(text, "indices", 0, MOST_IMAGES) for text in texts]
    store = Store(options.folder)
    found = curve(store, options.measure)
    images = sorted({p.images for p in found.points})
    models = ", ".join(dict.fromkeys(cell.model for cell in store.cells()))
    shown = "-".join(map(str, dict.fromkeys((images[0], images[-1]))))
    plot, pictures = curve_plot(found, f"{models}: {shown} images a cell"), contact_sheet(store, indices)
    save(out, lambda part: save_figure(plot, part))
    save(numbers, lambda part: part.write_text(to_csv(found), encoding="utf-8"))
    save(sheet, lambda part: save_figure(pictures, part))
    print(f"plot: {out}\nnumbers: {numbers}\ncontact sheet: {sheet}")
    return 0
