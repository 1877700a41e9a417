"""Run samplers on the same seed and draw their pictures side by side, with their numbers underneath.

All samplers of a family start from the same noise, so differences between the pictures come from the method. Samplers of several
families may run together: each uses the model of its family, and its speed-up is relative to the baseline of its family (mar,
llamagen, tar). The baseline runs first, after an untimed warm-up step. Seconds do not include the decoder. PSNR and SSIM compare
each image with the baseline's; a word takes their place where a method keeps the distribution of images only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from ..assembly import DEMO, decode
from ..reports.grid import compare_grid
from ..reports.maps import token_map
from ..reports.record import PLAIN, Report, to_json, to_table
from ..samplers.baseline import qualities
from .conditions import conditions
from .options import MOST_IMAGES, SEEDS, condition_options, model_options, output, sampler_options, save, whole
from .planning import measured_against, prepare, with_draft
from .running import draw, warm_up

PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    sampler_options(parser)
    condition_options(parser, "seed of the noise")
    add = parser.add_argument
    add("--out", type=Path, default=Path("compare.png"), help="the picture; default compare.png")
    add("--json", type=Path, metavar="FILE", help="also write the numbers (docs/report.md)")
    add("--maps", type=Path, metavar="FILE", help="also draw when and how each token was decided")
    add("--differences", action="store_true", help="also draw each image's difference from the baseline's, amplified")
    add("--columns", type=int, default=0, metavar="N", help="pictures a row; default chosen")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    out = output(options.out, "out", PICTURES)
    maps, numbers = output(options.maps, "maps", PICTURES), output(options.json, "json", (".json",))
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)
    planned, asked = prepare(options)
    # Conditions before drafts: Tar's language model, which is large, is freed by then.
    what = conditions(planned, options.label, options.text, batch, options, seed, asked)
    planned = with_draft(planned, options)
    warmed: set[int] = set()
    for p, condition in zip(planned, what, strict=True):
        # Token samplers check their inputs here. A MAR's first step is expensive, so one sampler warms up for all.
        if not p.on.masked or id(p.on) not in warmed:
            warm_up(p, condition)
        warmed.add(id(p.on))
    pictures: list[np.ndarray] = []
    reports: list[Report] = []
    for p, condition in zip(planned, what, strict=True):
        made = draw(p, condition, seed)
        pictures.append(decode(p.on, made).numpy())
        reports.append(made.report)
    labels, base = [p.label for p in planned], measured_against(planned)
    quality = qualities(pictures, reports, base)
    print(to_table(reports, labels, base, quality))
    for note in dict.fromkeys(report.note for report in reports if report.note):
        print(f"note: {note}")
    assert out is not None
    models = list(dict.fromkeys(p.on.model.name for p in planned))
    drawn = ", ".join(dict.fromkeys(name for condition in what for name in condition.names))
    title = f"{drawn}, seed {seed}, {models[0] if len(models) == 1 else f'the {DEMO}'}"
    drawn_below = {"quality": quality, "differences": options.differences}
    _write(compare_grid(pictures, labels, reports, options.columns, base, title=title, **drawn_below), out)
    print(f"picture: {out}")
    if maps:
        _write(_maps(pictures, labels, reports, title), maps)
        print(f"token maps: {maps}")
    if numbers:
        save(numbers, lambda part: part.write_text(to_json(reports, base, quality) + "\n", encoding="utf-8"))
        print(f"numbers: {numbers}")
    return 0


def _maps(pictures: list[np.ndarray], labels: list[str], reports: list[Report], title: str) -> np.ndarray:
    """Token maps of all runs: the AR step of every token (once if it is the same for all), draft outcomes, islands."""
    cells: list[np.ndarray] = []
    names: list[str] = []
    for i, (picture, label, report) in enumerate(zip(pictures, labels, reports, strict=True)):
        judged = "outcome" in report.maps and bool((report.maps["outcome"] != PLAIN).any())
        same = i > 0 and np.array_equal(report.maps["step"], reports[0].maps["step"])
        shown = {"fixed at step": not same, "outcome": judged, "islands": "islands" in report.maps}
        for what in (name for name, show in shown.items() if show):
            cells.append(token_map(report, what, picture))
            names.append(f"{label}: {what}")
    return compare_grid(cells, names, [None] * len(cells), title=title)


def _write(picture: np.ndarray, path: Path) -> None:
    save(path, Image.fromarray(picture).save)
