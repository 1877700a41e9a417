"""Time-lapse: an animation in which the tokens of several runs appear when they were decided, all runs on one clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import UserError
from .drawing import check_batch, resize
from .grid import compare_grid
from .record import Report

FPS = 12  # frames a second
_HOLD = FPS  # further frames at the end, which show the last one
_SIDE = 384  # pixels of a run's images; larger ones are reduced
_GREY = 128  # colour of tokens that are not decided yet


def time_lapse(
    images: Sequence[np.ndarray], labels: Sequence[str], reports: Sequence[Report | None], duration: float
) -> np.ndarray:
    """Draw the frames of an animation, each a grid of all runs with their labels and the seconds that have passed.

    The steps of a run share its measured seconds evenly. The slowest run takes ``duration``, and the others less in
    proportion. A token shows the cell of the final image once its step has ended. Given tokens of an edit are shown
    from the start.

    Args:
        images: the decoded images of a run, uint8 [N, H, W, 3]; one array a run.
        labels: one a run.
        reports: one a run, with seconds and the map "step".
        duration: seconds of the animation, without the last second, which shows the finished images.

    Returns:
        uint8 [F, height, width, 3], for 12 frames a second.

    Raises:
        UserError: a report is missing, has no seconds or map, or is of another number of images.
    """
    runs = [_Run(*run) for run in zip(images, labels, reports, strict=True)]
    slowest = max(run.report.seconds for run in runs)
    last = max(1, round(duration * FPS))

    frames = []
    for k in range(last + 1):
        clock = slowest * (k / last)
        cells = [run.at(clock) for run in runs]

        # Reports that hold nothing but the seconds so far. The grid leaves out 0.
        clocks = []
        for run in runs:
            passed = max(1e-9, min(clock, run.report.seconds))
            clocks.append(replace(run.report, seconds=passed, counts={}))

        frames.append(compare_grid(cells, labels, clocks, baseline=[None] * len(runs)))

    frames += [frames[-1]] * _HOLD
    return np.stack(frames)


class _Run:
    """A run: its report, its images, reduced, and for every pixel the step of its token."""

    def __init__(self, images: np.ndarray, label: str, report: Report | None):
        if report is None or "step" not in report.maps or not report.seconds > 0:
            raise UserError(
                f"report: {label[:60]!r} has no record of when its tokens were decided; "
                "connect the report of the sampler that made the image."
            )

        steps = report.maps["step"]
        if len(check_batch(images, "image")) != len(steps):
            raise UserError(
                f"image: {label[:60]!r} holds {len(images)} images, and its report is of {len(steps)}; "
                "connect those of one run."
            )

        self.report = report

        # The images, reduced so that their sheet has the side of a run.
        n, h, w, _ = images.shape
        sheet_columns = math.ceil(math.sqrt(n))
        scale = min(1, _SIDE / sheet_columns / max(h, w))
        h = max(1, round(h * scale))
        w = max(1, round(w * scale))
        self.images = np.stack([resize(image, w, h) for image in images])

        # The step of every pixel's token.
        rows = np.arange(h) * steps.shape[1] // h
        columns = np.arange(w) * steps.shape[2] // w
        self.step = steps[:, rows][:, :, columns, None]
        self.steps = int(steps.max()) + 1

    def at(self, clock: float) -> np.ndarray:
        """The images after ``clock`` seconds."""
        ended = self.steps * min(1.0, clock / self.report.seconds)
        return np.where(self.step + 1 <= ended, self.images, np.uint8(_GREY))
