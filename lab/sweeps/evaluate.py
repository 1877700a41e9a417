"""Measure the images of a sweep: distance from the plain sampler's, and quality against reference images.

PSNR and SSIM compare every image with the plain sampler's image of the same index. FID compares Inception's features of
all images with those of --reference, or of the plain sampler's images if there is no reference. Figures have a 95 %
bootstrap interval. Figures that can be compared with the plain sampler's also have the interval of the paired
difference. Seconds of the sweep stand beside them. Results are added to the folder.

In the folder of a paper (lab/papers) every sweep is measured, and the paper's tables are printed with our figures
beside the paper's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch

from ...cli.options import choose_device, whole
from ...errors import UserError, amount
from ...reports.files import typed_path
from ...reports.table import markdown
from ...runs.loading import AUTO
from ..training.judge import JUDGES
from . import paper_files
from .clip import CLIP, Clip
from .features import Inception, open_reference
from .folder import Folder
from .joined import write_joined
from .judging import PictureBookJudge
from .measures import (
    FEATURES,
    JUDGE,
    MEASURES,
    PROMPT,
    Means,
    Result,
    check,
    evaluate,
    measured,
)
from .paper_files import Paper
from .statistics import RESAMPLES
from .store import Store
from .table import read, table

_OF_PAIRS = ("psnr", "ssim", "identical")
_OF_INCEPTION = ("fid", "is")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", help="folder of a sweep, or of a paper's sweeps")
    parser.add_argument(
        "--measures",
        metavar="NAMES",
        help=f"separated by commas: {', '.join(MEASURES)}, judge (all of the demo's judge); "
        "default psnr, ssim and identical, and with --reference fid and is",
    )
    parser.add_argument(
        "--reference",
        metavar="FILE",
        help="npz file of images (arr_0), of the statistics for FID (mu, sigma), or of both; default the plain "
        "sampler's images",
    )
    parser.add_argument("--resize", action="store_true", help="measure images at the size of the reference's")
    parser.add_argument("--clip", default=CLIP, metavar="MODEL", help="model of the measure clip; default %(default)s")
    parser.add_argument("--npz", metavar="FOLDER", help="join the shards of every cell into FOLDER/CELL.npz")
    parser.add_argument(
        "--judge",
        default="judge",
        choices=JUDGES,
        help="the network of the judge's measures: of convolutions (judge, default) or of patches and attention",
    )
    parser.add_argument(
        "--resamples",
        default=str(RESAMPLES),
        metavar="N",
        help=f"bootstrap resamples of an interval; default {RESAMPLES}",
    )
    parser.add_argument("--device", default=AUTO, help="auto (default), cpu, cuda, cuda:1 or mps")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    folder = Folder(options.folder)
    paper = paper_files.stored(folder)
    stores = {"": Store(options.folder)} if paper is None else paper_files.stores(folder, paper)
    measures = _measures_of(paper, stores, options)
    if options.npz is not None:
        for name, store in stores.items():
            for path in write_joined(store, typed_path(options.npz, "npz"), f"{name}-" if name else ""):
                print(f"written: {path}", file=sys.stderr)

    resamples = whole(options.resamples, "resamples", 10, 100_000)
    device = choose_device(options.device)

    # Frechet distances are computed in fp64, which MPS does not have.
    means = Means(resamples=resamples, device=torch.device("cpu") if device.type == "mps" else device)
    if options.reference is not None:
        means.reference = open_reference(typed_path(options.reference, "reference"))
        means.resize = options.resize
        if options.resize and means.reference.pictures is None:
            raise UserError(
                f"resize: {means.reference.name} holds only statistics (mu, sigma), which have no size; leave --resize "
                "out, or give a reference with images (arr_0)."
            )
    elif options.resize:
        raise UserError("resize: this option needs the size of a reference; give --reference, or leave --resize out.")

    _expect_measurable(measures, stores, means)

    # Networks are loaded after the check, and only those that a measure needs.
    kinds = {MEASURES[measure].kind for own in measures.values() for measure in own}
    if FEATURES in kinds:
        means.inception = Inception(device)
    if PROMPT in kinds:
        means.clip = Clip(options.clip, device)
    if JUDGE in kinds:
        means.judge = PictureBookJudge(options.judge)

    failed: list[str] = []
    for name, own in measures.items():
        _measure(name, stores[name], own, means, failed)

    if paper is not None:
        print(paper_files.comparison(paper, stores))

    if failed:
        count = amount(len(failed), "cells")
        raise UserError(
            f"measures: {count} could not be measured, for the reasons above; the tables hold all other cells."
        )
    return 0


def _expect_measurable(measures: dict[str, list[str]], stores: Mapping[str, Store], means: Means) -> None:
    """Leave out the sweeps in which nothing can be measured, and say why.

    Raises:
        UserError: it is so in all of them.
    """
    problems: dict[str, UserError] = {}
    for name, own in measures.items():
        try:
            check(stores[name], own, means)
        except UserError as problem:
            problems[name] = problem

    if problems and len(problems) == len(measures):
        raise next(iter(problems.values()))

    for name, why in problems.items():
        print(f"{name} is not measured: {why}", file=sys.stderr)
        del measures[name]


def _measure(name: str, store: Store, measures: Sequence[str], means: Means, failed: list[str]) -> None:
    """Measure a sweep and print its tables; ``name`` is that of a paper's sweep, or "".

    ``failed`` as for :func:`.measures.evaluate`. A paper's sweep without any results does not stop the
    others.
    """

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        results = evaluate(store, measures, means, log, failed)
    except UserError as problem:
        if not name:
            raise
        failed.append(f"{name} is not measured: {problem}")
        log(failed[-1])
        return

    if name:
        print(f"{name}\n")

    print(table([read(store)], ["images", "seconds", "speedup", *measured(results)]))
    differences = _differences(store, results)
    if differences:
        print(f"\nDifference from the plain sampler, paired:\n\n{differences}")

    if name:
        print()


def _measures_of(paper: Paper | None, stores: Mapping[str, Store], options: argparse.Namespace) -> dict[str, list[str]]:
    """The measures of each sweep that is measured, by its name: those that the options name, or the usual ones.

    Of a paper's sweeps these are the ones in its tables. They compare with reference images: without these nothing is
    measured, and only what a sweep records is printed.
    """
    named = options.measures is not None
    if paper is None:
        return {name: _measures(options.measures, options.reference is not None) for name in stores}

    found = {}
    for name, store in stores.items():
        own = paper.measures(name)
        drawn = any(store.shards(cell) for cell in store.cells())
        if own and drawn:
            found[name] = own

    if named:
        asked = _measures(options.measures, options.reference is not None)
        return {name: asked for name in found}

    if options.reference is None and found:
        print("Only times and counts are shown: name the images to compare with by --reference.", file=sys.stderr)
        return {}

    return found


def _measures(text: str | None, reference: bool) -> list[str]:
    """The measures of a run."""
    if text is None:
        return [*_OF_PAIRS, *_OF_INCEPTION] if reference else list(_OF_PAIRS)

    names: list[str] = []
    for part in text.split(","):
        name = part.strip().lower()
        if name == "judge":
            names += [measure for measure in MEASURES if MEASURES[measure].kind == JUDGE]
        elif name:
            names.append(name)

    if not names:
        raise UserError(f"measures: the list is empty; choose one or more of {', '.join(MEASURES)} and judge.")
    for name in names:
        if name not in MEASURES:
            raise UserError(f"measures: {name!r} is not one of {', '.join(MEASURES)} and judge.")

    if reference and "fid" not in names:
        raise UserError("reference: no measure of this run uses a reference; add fid, or leave the reference out.")

    return list(dict.fromkeys(names))


def _differences(store: Store, results: Sequence[Result]) -> str:
    """A table of the paired differences; "" without any."""
    titles = {cell.id: cell.title for cell in store.cells()}

    rows = []
    for result in results:
        value, low, high = result.difference
        if value is not None:
            measure = MEASURES[result.measure]
            interval = f"{measure.show(low)} to {measure.show(high)}"
            rows.append([titles[result.cell], measure.title, measure.show(value), interval])

    if not rows:
        return ""
    return markdown([["cell", "measure", "difference", "95 % interval"], *rows])
