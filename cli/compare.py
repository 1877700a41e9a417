"""Run samplers on the same seed and draw their pictures side by side, with their numbers underneath.

All samplers start from the same noise, so a difference in the pictures is the method's. The baseline (mar, if it is
among them) runs first, after one untimed AR step that warms the libraries up. Seconds are the sampler's, without the
decoder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError
from ..reports.pictures import compare_grid, token_map
from ..reports.record import PLAIN, Report, to_json, to_table
from ..samplers.labels import label_sets, resolve_labels
from .running import (
    MOST_IMAGES,
    SEEDS,
    decode,
    defaults,
    draw,
    load,
    model_options,
    output,
    plan,
    sampler_options,
    warm_up,
    whole,
    with_draft,
)

PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    model_options(parser)
    sampler_options(parser)
    parser.add_argument("--label", default="0", help="class names or ids, separated by commas; default class 0")
    parser.add_argument("--seed", default="7", help="seed of the noise; default 7")
    parser.add_argument("--batch", default="1", metavar="N", help="images of each label; default 1")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="the picture; default compare.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers (docs/report.md)")
    parser.add_argument("--maps", type=Path, metavar="FILE", help="also draw when and how each token was decided")
    parser.add_argument("--columns", type=int, default=0, metavar="N", help="pictures a row; default chosen")


def run(options: argparse.Namespace) -> int:
    """Sample, decode, draw and tell."""
    out = output(options.out, "out", PICTURES)
    maps, numbers = output(options.maps, "maps", PICTURES), output(options.json, "json", (".json",))
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)
    plan(options.samplers, options.sets, options.steps, {})  # mistakes are told before anything is loaded
    model, decoder, metadata = load(options)
    known = model.label_set if model.label_set in label_sets() else ""  # a file may name a list we do not have
    condition = resolve_labels(options.label, known, batch)
    condition.class_ids(model.net.config.classes, model.label_set, next(model.net.parameters()).device)
    if len(condition) > MOST_IMAGES:
        raise UserError(f"batch: {len(condition)} images are more than {MOST_IMAGES}; ask for fewer.")
    demo = model.label_set == "picture-book"
    planned = with_draft(plan(options.samplers, options.sets, options.steps, defaults(model, metadata), demo), options)
    warm_up(planned[0], model, condition)
    pictures: list[np.ndarray] = []
    reports: list[Report] = []
    for p in planned:
        latents, report = draw(p, model, condition, seed)
        if not bool(latents.isfinite().all()):
            remedy = "choose --dtype fp32 or --set t_max=950"
            raise UserError(f"{p.entry.name}: it ended in numbers that are not finite; {remedy}.")
        pictures.append(decode(decoder, latents, report).numpy())
        reports.append(report)
    labels = [p.label for p in planned]
    print(to_table(reports, labels))
    assert out is not None
    what = ", ".join(dict.fromkeys(condition.names))
    title = f"{what}, seed {seed}, {model.name}"
    _write(compare_grid(pictures, labels, reports, options.columns, title=title), out)
    print(f"picture: {out}")
    if maps:
        _write(_maps(pictures, labels, reports, title), maps)
        print(f"token maps: {maps}")
    if numbers:
        numbers.write_text(to_json(reports) + "\n", encoding="utf-8")
        print(f"numbers: {numbers}")
    return 0


def _maps(pictures: list[np.ndarray], labels: list[str], reports: list[Report], title: str) -> np.ndarray:
    """When the tokens were fixed, once for all runs that agree on it, and the outcome of judged drafts."""
    cells: list[np.ndarray] = []
    names: list[str] = []
    for i, (picture, label, report) in enumerate(zip(pictures, labels, reports, strict=True)):
        judged = "outcome" in report.maps and bool((report.maps["outcome"] != PLAIN).any())
        same = i > 0 and np.array_equal(report.maps["step"], reports[0].maps["step"])
        for what in ([] if same else ["fixed at step"]) + (["outcome"] if judged else []):
            cells.append(token_map(report, what, picture))
            names.append(f"{label}: {what}")
    return compare_grid(cells, names, [None] * len(cells), marked=False, title=title)


def _write(picture: np.ndarray, path: Path) -> None:
    Image.fromarray(picture).save(path)
