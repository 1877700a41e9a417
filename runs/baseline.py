"""Comparisons of runs: which run is the baseline of which, whether PSNR and SSIM mean anything between two, and gains.

It asks the samplers' settings what they promise, exact or lossless, and why a run gained nothing; reports alone do not
know.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from ..reports.quality import (
    DISTRIBUTION,
    OTHER_CONDITION,
    OTHER_EDIT,
    OTHER_IMAGE,
    OTHER_MODEL,
    OTHER_SEED,
    Quality,
    measure,
)
from ..reports.record import Baseline, Report, against
from ..samplers.settings import knobs, settings_from
from .registry import SAMPLERS

# Above the window of any grid, so a run of unknown grid does not count as exact.
_UNKNOWN_SIDE = 1 << 16
# Settings that decide which image is drawn from the noise. DiSA's (diffusion_steps_end) are not among them: the first
# tokens, which decide the layout, keep all diffusion steps.
_DECIDE_IMAGE = (
    "steps",
    "diffusion_steps",
    "order",
    "cfg",
    "cfg_img",
    "cfg_schedule",
    "cfg_interval",
    "t_max",
    "solver",
    "time_shift",
    "use_norm",
    "temperature",
    "entropy_temperature",
    "top_k",
    "top_p",
)


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison."""

    group: Hashable  # runs of one group can be compared: one model family and size
    sampler: str  # its command-line name
    settings: Mapping[str, Any]  # setting name to value
    side: int  # of the token grid
    # passes and head calls, if known; of several runs that could be the baseline the one with most is taken
    work: tuple[int, ...] = ()
    seconds: float = 0.0  # an image, if known
    model: str = ""  # its name, if a group may hold several

    @property
    def plain(self) -> bool:
        """Whether the plain sampler ran."""
        return self.sampler in SAMPLERS and SAMPLERS[self.sampler].baseline

    @property
    def exact(self) -> bool:
        """Whether it gives the plain sampler's image."""
        settings = _settings(self.sampler, self.settings)
        return settings is not None and settings.exact(self.side)

    def comparable(self, other: ComparedRun) -> bool:
        """Whether both ran on one model at one size. PAR's model is its own, and is compared with LlamaGen's."""
        return self.side == other.side and (self.model == other.model or "par" in (self.sampler, other.sampler))


def _settings(sampler: str, values: Mapping[str, Any]) -> Any:
    """The settings object of a report's values; None if the sampler or a value is unknown."""
    if sampler not in SAMPLERS:
        return None
    kind = SAMPLERS[sampler].settings
    try:
        return settings_from(kind, {name: value for name, value in values.items() if name in knobs(kind)})
    except UserError:
        return None


def is_lossless(sampler: str, values: Mapping[str, Any]) -> bool:
    """Whether a run keeps the distribution of its baseline's images but gives other ones."""
    settings = _settings(sampler, values)
    return settings is not None and settings.lossless()


def no_gain(report: Report, baseline: Report | None = None) -> str:
    """Why a run was not faster than the unaccelerated sampler; "" if it was, or if that is not known.

    The reason comes from the run's counts and settings. Seconds are a reason if they were measured in repeats in turn
    and differ by more than the repeats do: two single runs may differ by any factor on a busy machine.
    """
    counts = report.counts
    settings = _settings(report.sampler, report.settings)

    reason = ""
    if counts.get("rejected") and not counts.get("accepted"):
        reason = (
            "No draft was accepted, so all drafts were extra work; reduce threshold, lookahead, draft_length or tau, "
            "whichever the sampler has."
        )
    elif counts.get("drafted_steps") and not counts.get("accepted_steps"):
        reason = "No drafted diffusion step was accepted; reduce speculation, or set it to 0."
    elif settings is not None:
        reason = settings.no_gain(report)

    speedup = report.speedup(baseline)
    if speedup is not None and speedup.told and speedup.value is not None and speedup.value < 1:
        return f"{reason or 'No gain here.'} This run took {1 / speedup.value:.2f} times as long as the baseline."
    return reason


def works_towards_another_image(report: Report, baseline: Report) -> bool:
    """Whether two runs from the same noise are not meant to draw one image.

    Their methods or settings differ in what decides the image: the number of steps, the order, guidance, temperature.
    Other accelerators approximate the plain sampler's image, and PSNR says how closely. None is the model's own value,
    which a report does not know, so it counts as equal to every value.
    """
    for name in _DECIDE_IMAGE:
        values = [run.settings.get(name) for run in (report, baseline)]
        if None not in values and values[0] != values[1]:
            return True

    sides = [int(run.maps["step"].shape[-1]) if "step" in run.maps else _UNKNOWN_SIDE for run in (report, baseline)]
    made = [_settings(run.sampler, run.settings) for run in (report, baseline)]
    return any(s is not None and s.different_image and not s.exact(side) for s, side in zip(made, sides, strict=True))


def run_of_report(report: Report, group: Hashable) -> ComparedRun:
    """A run that has a report."""
    side = int(report.maps["step"].shape[-1]) if "step" in report.maps else _UNKNOWN_SIDE
    work = tuple(report.counts.get(name, 0) for name in ("transformer_passes", "head_calls"))
    seconds = report.seconds / report.images
    return ComparedRun(group, report.sampler, report.settings, side, work, seconds, report.target)


def baselines(runs: Sequence[ComparedRun]) -> list[int]:
    """For each run the index of its baseline: of its :func:`candidates`, the one that comes first by

    1. most work, which is the same when a comparison is repeated;
    2. most seconds;
    3. its place among the runs.
    """
    return [max(among, key=lambda i: (runs[i].work, runs[i].seconds)) for among in candidates(runs)]


def candidates(runs: Sequence[ComparedRun]) -> list[list[int]]:
    """For each run the indices of the runs of its group that may be its baseline.

    Runs of its model and size come first, because it cannot be compared with other runs. They are the first of these
    that there are:

    1. runs of the plain sampler at exact settings;
    2. runs of accelerators at exact settings;
    3. all runs.
    """
    members: dict[Hashable, list[int]] = {}
    for i, run in enumerate(runs):
        members.setdefault(run.group, []).append(i)

    exact = [run.exact for run in runs]

    found: list[list[int]] = []
    for run in runs:
        group = members[run.group]
        comparable = [i for i in group if runs[i].comparable(run)]
        among = comparable if len(comparable) > 1 else group

        exact_ones = [i for i in among if exact[i]]
        found.append([i for i in exact_ones if runs[i].plain] or exact_ones or among)

    return found


def qualities(
    images: Sequence[np.ndarray], reports: Sequence[Report | None], baseline: Baseline
) -> list[Quality | None]:
    """Quality of every cell, a uint8 batch [N, H, W, 3], against its baseline; None for baselines and for cells without
    one.

    ``baseline`` as in :func:`reports.record.against`; a report is None where none exists.

    Raises:
        UserError: a cell is not a uint8 batch.
    """
    base_of = [baseline] * len(images) if isinstance(baseline, int) else baseline
    out: list[Quality | None] = []
    for i, (base, report, base_report) in enumerate(zip(base_of, reports, against(reports, base_of), strict=True)):
        if base is None or base == i:
            out.append(None)
            continue

        own = images[i]
        of_base = images[base]
        out.append(measure(own, of_base, quality_word(report, base_report)))
    return out


def quality_word(report: Report | None, baseline: Report | None) -> str:
    """The word of :class:`.Quality` that replaces PSNR and SSIM between two runs; "" if the figures apply.

    They apply to two runs that should draw the same image: one model, one prompt, one edit (the same mask and the same
    image to start from), one seed, and a method and settings that work towards the same image. Otherwise they measure
    that difference, not what the method costs. Of two images without a report nothing is known, so PSNR and SSIM
    compare them like any two images.
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
    if works_towards_another_image(report, baseline):
        return OTHER_IMAGE
    return DISTRIBUTION if any(is_lossless(r.sampler, r.settings) for r in (report, baseline)) else ""
