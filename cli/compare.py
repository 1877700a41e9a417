"""Run samplers with the same seed and save their images side by side, with their figures.

All samplers of a family start from the same noise, so differences between the images come from the method. Samplers of
several families can run together: each uses the model of its family and is compared with the baseline of that family,
its plain sampler. The baseline runs first, after an untimed warm-up step. Seconds do not include decoding. Those of a
single run vary with what else the machine does: --repeats 5 runs the samplers in turn and gives the speed-up with its
spread. PSNR and SSIM compare each image with the baseline's; "same distribution" stands in their place for methods that
keep only the distribution of the images, and "different image" for runs that are meant to give one, for example by
fewer steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from ..reports.files import Result, as_text, distinct, encoded, image_endings, output, save
from ..reports.grid import MOST_COLUMNS, compare_grid, expect_fits
from ..reports.maps import token_map
from ..reports.record import LONGEST_NOTE, PLAIN, Report, repeated, to_json, to_table
from ..reports.table import literal
from ..runs.baseline import qualities
from ..runs.drawing import decode
from ..runs.limits import MOST_IMAGES, SEEDS
from ..runs.loading import DEMO
from ..samplers.conditioning import AnyCondition
from .conditions import conditions
from .options import condition_options, model_options, sampler_options, whole
from .planning import Planned, measured_against, prepare, with_draft
from .running import in_turn, warm_up


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    sampler_options(parser)
    condition_options(parser, "seed of the noise")

    add = parser.add_argument
    add("--out", default="compare.png", metavar="FILE", help="the image; default compare.png")
    add("--json", metavar="FILE", help="also write the numbers as JSON (see docs/report.md)")
    add("--maps", metavar="FILE", help="also write an image that shows when and how each token was decided")
    add(
        "--differences",
        action="store_true",
        help="also show how each image differs from the baseline's image, amplified",
    )
    add(
        "--repeats",
        default="1",
        metavar="N",
        help="number of timed runs of each sampler, in turn; default 1, which is too few to measure a speed-up",
    )
    add("--columns", default="0", metavar="N", help="images per row; default: chosen automatically")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)
    repeats = whole(options.repeats, "repeats", 1, 1000)
    columns = whole(options.columns, "columns", 0, MOST_COLUMNS)
    out = output(options.out, "out", image_endings())
    maps = output(options.maps, "maps", image_endings())
    numbers = output(options.json, "json", (".json",))
    assert out is not None
    distinct(out=out, maps=maps, json=numbers)

    planned, asked = prepare(options)
    expect_fits(len(planned), columns)

    # Conditions before drafts: Tar's language model, which is large, is freed by then.
    what = conditions(planned, options.label, options.text, batch, options, seed, asked)
    planned = with_draft(planned, options)

    images, reports = _drawn(planned, what, seed, repeats)

    labels = [p.label for p in planned]
    base = measured_against(planned)
    quality = qualities(images, reports, base)
    title = _title(planned, what, seed)
    grid = compare_grid(
        images, labels, reports, columns, base, title=title, quality=quality, differences=options.differences
    )

    results = [Result("out", out, encoded(grid, out))]
    if maps:
        results.append(Result("maps", maps, encoded(_maps(images, labels, reports, title), maps)))
    if numbers:
        results.append(Result("json", numbers, as_text(to_json(reports, base, quality) + "\n")))

    # Before the table: a reader of the table, such as head, may end this program.
    unsaved = save(results)

    print(to_table(reports, labels, base, quality))
    if repeats == 1 and any(i is not None for i in base):
        print(
            "Each sampler was timed in a single run, and times vary from run to run; use --repeats 5 to measure the "
            "speed-up."
        )
    for note in dict.fromkeys(report.note for report in reports if report.note):
        print(f"note: {literal(note, LONGEST_NOTE)}")

    if unsaved:
        raise UserError(unsaved)

    titles = {"out": "image", "maps": "token maps", "json": "numbers"}
    for result in results:
        print(f"{titles[result.field]}: {result.path}")
    return 0


def _drawn(
    planned: Sequence[Planned], what: Sequence[AnyCondition], seed: int, repeats: int
) -> tuple[list[np.ndarray], list[Report]]:
    """The images and the report of every sampler, which runs ``repeats`` times with the same seed."""
    warmed: set[int] = set()
    for p, condition in zip(planned, what, strict=True):
        # Token samplers check their inputs here. A MAR's first step is expensive, so one sampler warms up for all.
        if p.on.kind.codes or id(p.on) not in warmed:
            warm_up(p, condition)
        warmed.add(id(p.on))

    images: list[np.ndarray] = []
    runs: list[list[Report]] = [[] for _ in planned]
    for repeat, i, made in in_turn(planned, what, [seed] * repeats):
        runs[i].append(made.report)
        if repeat == 0:  # every repeat draws the same images
            images.append(decode(planned[i].on, made).numpy())

    return images, [repeated(reports) for reports in runs]


def _title(planned: Sequence[Planned], what: Sequence[AnyCondition], seed: int) -> str:
    """What the images show, the seed and the model."""
    names: list[str] = []
    for condition in what:
        names += condition.names
    shown = ", ".join(dict.fromkeys(names))

    models = list(dict.fromkeys(p.on.model.name for p in planned))
    model = models[0] if len(models) == 1 else f"the {DEMO}"

    return f"{shown}, seed {seed}, {model}"


def _maps(images: list[np.ndarray], labels: list[str], reports: list[Report], title: str) -> np.ndarray:
    """Token maps of all runs: the AR step of every token (once if it is the same for all), draft outcomes, islands."""
    cells: list[np.ndarray] = []
    names: list[str] = []

    for i, (image, label, report) in enumerate(zip(images, labels, reports, strict=True)):
        shown = []

        same_order = i > 0 and np.array_equal(report.maps["step"], reports[0].maps["step"])
        if not same_order:
            shown.append("fixed at step")
        if "outcome" in report.maps and (report.maps["outcome"] != PLAIN).any():
            shown.append("outcome")
        if "islands" in report.maps:
            shown.append("islands")

        for what in shown:
            cells.append(token_map(report, what, image))
            names.append(f"{label}: {what}")

    return compare_grid(cells, names, [None] * len(cells), title=title)
