"""What a run's settings promise, exact or lossless, and the baseline of a comparison."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import UserError
from ..reports.drawing import check_batch
from ..reports.quality import (
    DISTRIBUTION,
    OTHER_CONDITION,
    OTHER_EDIT,
    OTHER_MODEL,
    OTHER_SEED,
    Quality,
    measure,
)
from ..reports.record import Baseline, Report, against
from .registry import SAMPLERS
from .settings import knobs, make

# Above the window of any grid.
_UNKNOWN_SIDE = 1 << 16


@dataclass(frozen=True)
class Run:
    """A run of a comparison."""

    group: Hashable  # runs of one group can be compared: one model family and size
    sampler: str  # its command-line name
    settings: Mapping[str, Any]  # setting name to value
    side: int  # of the token grid
    # passes and head calls, if known; of several runs that could be the baseline the one with most is taken
    work: tuple[int, ...] = ()
    seconds: float = 0.0  # an image, if known

    @property
    def plain(self) -> bool:
        """Whether the plain sampler ran."""
        return self.sampler in SAMPLERS and SAMPLERS[self.sampler].baseline

    @property
    def exact(self) -> bool:
        """Whether it gives the plain sampler's image."""
        settings = _settings(self.sampler, self.settings)
        return settings is not None and settings.exact(self.side)


def _settings(sampler: str, values: Mapping[str, Any]) -> Any:
    """The settings object of a report's values; None if the sampler or a value is unknown."""
    if sampler not in SAMPLERS:
        return None
    kind = SAMPLERS[sampler].settings
    try:
        return make(kind, {name: value for name, value in values.items() if name in knobs(kind)})
    except UserError:
        return None


def lossless(sampler: str, values: Mapping[str, Any]) -> bool:
    """Whether a run keeps the distribution of its baseline's images but gives other ones."""
    settings = _settings(sampler, values)
    return settings is not None and settings.lossless()


def of_report(report: Report, group: Hashable) -> Run:
    """A run that has a report."""
    side = int(report.maps["step"].shape[-1]) if "step" in report.maps else _UNKNOWN_SIDE
    work = tuple(report.counts.get(name, 0) for name in ("transformer_passes", "head_calls"))
    return Run(group, report.sampler, report.settings, side, work, report.seconds / report.images)


def baselines(runs: Sequence[Run], alike: bool = False) -> list[int]:
    """For each run the index of its baseline: in its group the plain sampler, else an accelerator at its exact setting,
    else any of the runs.

    Of several that could be it the one with most work, then the slowest, then the first; with ``alike`` one that
    decodes serially, and of those the one with most settings in common with the run. The work goes before the seconds,
    which vary from run to run: the baseline stays the same when a comparison is repeated.
    """
    members: dict[Hashable, list[int]] = {}
    for i, run in enumerate(runs):
        members.setdefault(run.group, []).append(i)

    candidates: dict[Hashable, list[int]] = {}
    for group, own in members.items():
        exact = [i for i in own if runs[i].exact]
        candidates[group] = [i for i in exact if runs[i].plain] or exact

    def likeness(run: Run, i: int) -> tuple[bool, int]:
        is_serial = not runs[i].settings.get("parallel")
        return is_serial, sum(run.settings.get(name) == value for name, value in runs[i].settings.items())

    def choose(run: Run) -> int:
        found = candidates[run.group]
        if not found:
            found = members[run.group]
        elif alike:
            return max(found, key=partial(likeness, run))

        return max(found, key=lambda i: (runs[i].work, runs[i].seconds))

    return [choose(run) for run in runs]


def qualities(
    images: Sequence[np.ndarray], reports: Sequence[Report | None], baseline: Baseline
) -> list[Quality | None]:
    """Quality of every cell, a uint8 batch [N, H, W, 3], against its baseline; None for baselines and for cells without
    one.

    ``baseline`` as in :func:`reports.record.against`; a report is None where none exists.

    Raises:
        UserError: a cell is not a uint8 batch.
    """
    bases = [baseline] * len(images) if isinstance(baseline, int) else baseline
    out: list[Quality | None] = []
    for i, (base, report, other) in enumerate(zip(bases, reports, against(reports, bases), strict=True)):
        if base is None or base == i:
            out.append(None)
            continue

        own = check_batch(images[i], f"image {i + 1}")
        first = check_batch(images[base], f"image {base + 1}")
        out.append(measure(own, first, word_for(report, other)))
    return out


def word_for(report: Report | None, baseline: Report | None) -> str:
    """The word that takes the place of PSNR and SSIM between two runs, "" if the figures apply.

    They apply to two runs that should draw the same image: one model, one prompt, one edit (the same mask and the same
    image to start from) and one seed. Otherwise they measure that difference, not what the method costs. Of two images
    without a report nothing is known, and the figures are those of any two images.
    """
    if report is None or baseline is None:
        known = report or baseline
        return OTHER_EDIT if known is not None and known.edits else ""

    if report.target != baseline.target:
        return OTHER_MODEL
    if report.conditions != baseline.conditions:
        return OTHER_CONDITION
    if report.edits != baseline.edits:
        return OTHER_EDIT
    if report.seed != baseline.seed:
        return OTHER_SEED
    return DISTRIBUTION if any(lossless(r.sampler, r.settings) for r in (report, baseline)) else ""
