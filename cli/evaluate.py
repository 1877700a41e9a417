"""Measure the pictures of a sweep: their distance from the plain sampler's, and their quality against reference pictures.

PSNR, SSIM and LPIPS compare every picture with the plain sampler's picture of the same index. FID, Inception score, KID, precision and
recall compare features of all pictures with those of --reference, or without one with the plain sampler's. Every figure has a 95 %
bootstrap interval; figures that have a plain sampler's counterpart also have the interval of the paired difference. Results are appended
to results.jsonl in the folder; a figure of the same pictures is not computed again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ..errors import UserError
from ..scale.evaluation import RESAMPLES
from ..scale.features import INCEPTION, load_extractor, load_lpips
from ..scale.measures import LPIPS, Means, check, evaluate
from ..scale.references import open_reference
from ..scale.results import FEATURES, JUDGE, MEASURES, Result, markdown, results_table
from ..scale.store import Store
from .main import load_judge
from .options import choose_device, whole

_OF_PAIRS = ("psnr", "ssim", "identical")
_OF_INCEPTION = ("fid", "is", "kid", "precision", "recall")
_OF_OTHERS = ("frechet", "kid", "precision", "recall")
_MOST_RESAMPLES = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", help="folder or fsspec address of a sweep")
    parser.add_argument(
        "--measures",
        metavar="NAMES",
        help=f"separated by commas, of {', '.join(MEASURES)}, and judge for all of the demo's judge; default psnr,ssim,identical, and with "
        "--reference or --extractor also those of features",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="real pictures: an npz file with arr_0 (as the ADM evaluator reads it) or with mu and sigma, or a folder of pictures; default "
        "the plain sampler's pictures",
    )
    parser.add_argument(
        "--extractor",
        metavar="NAME",
        help=f"of features: {INCEPTION} (default; needs torch-fidelity and its weights), or module:function, from uint8 [N, H, W, 3] to "
        "features [N, D]",
    )
    parser.add_argument(
        "--inception", type=Path, metavar="FILE", help="weights of Inception; default where torch.hub keeps them"
    )
    parser.add_argument(
        "--resamples",
        default=str(RESAMPLES),
        metavar="N",
        help=f"bootstrap resamples of every interval; default {RESAMPLES}",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    measures = _measures(options.measures, options.reference is not None, options.extractor)
    resamples = whole(options.resamples, "resamples", 10, _MOST_RESAMPLES)
    store = Store(options.folder)
    kinds = {MEASURES[name].kind for name in measures}
    device = choose_device(options.device)
    # Frechet distance and KID are computed in fp64, which MPS does not have.
    means = Means(resamples=resamples, device=torch.device("cpu") if device.type == "mps" else device)
    if options.reference is not None:
        means.reference = open_reference(options.reference)
    check(store, measures, means)
    if FEATURES in kinds:
        means.extractor = load_extractor(options.extractor or INCEPTION, options.inception, device)
        check(store, measures, means)
    if LPIPS in measures:
        means.lpips = load_lpips(device)
    if JUDGE in kinds:
        means.judge = load_judge()
    results = evaluate(store, measures, means, lambda text: print(text, file=sys.stderr, flush=True))
    print(results_table(store, results))
    if table := _differences(store, results):
        print(f"\nDifference from the plain sampler, paired:\n\n{table}")
    return 0


def _measures(text: str | None, reference: bool, extractor: str | None) -> list[str]:
    """The measures of a run.

    Raises:
        UserError: an unknown one, or one that the extractor does not have.
    """
    inception = extractor in (None, INCEPTION)
    if text is None:
        more = (_OF_INCEPTION if inception else _OF_OTHERS) if reference or extractor else ()
        return [*_OF_PAIRS, *more]
    names: list[str] = []
    for name in filter(None, (part.strip().lower() for part in text.split(","))):
        names += [m for m in MEASURES if MEASURES[m].kind == JUDGE] if name == "judge" else [name]
    if not names:
        raise UserError(f"measures: none is named; there are {', '.join(MEASURES)} and judge.")
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise UserError(f"measures: {unknown[0]!r} is not one of {', '.join(MEASURES)} and judge.")
    if not inception and (wrong := next((name for name in names if name in ("fid", "is")), None)):
        raise UserError(f"measures: {wrong} is a figure of {INCEPTION}; with another extractor name frechet.")
    if reference and not any(MEASURES[name].kind == FEATURES for name in names):
        raise UserError("reference: no measure of this run uses it; add fid, kid, precision or recall to --measures.")
    if extractor and not any(MEASURES[name].kind == FEATURES for name in names):
        raise UserError(
            "extractor: no measure of this run uses it; add frechet, kid, precision or recall to --measures."
        )
    return list(dict.fromkeys(names))


def _differences(store: Store, results: list[Result]) -> str:
    """A table of the paired differences; "" without any."""
    rows = [["cell", "measure", "difference", "95 % interval"]]
    titles = {cell.id: cell.title for cell in store.cells()}
    for result in results:
        value, low, high = result.difference
        if value is not None:
            show = MEASURES[result.measure].show
            rows.append([titles[result.cell], result.title, show(value), f"{show(low)} to {show(high)}"])
    return markdown(rows) if len(rows) > 1 else ""
