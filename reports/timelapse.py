"""Time-lapse: an animation in which the tokens of several runs appear when they were decided, all runs on one clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import UserError, amount
from .drawing import Canvas, Ink, contact_sheet, line_height, resize, text_width, wrap
from .record import Report
from .timing import FIRST_RUN

FPS = 12  # frames a second
_HOLD = 2 * FPS  # further frames at the end, which show the finished images
_SIDE = 512  # pixels of a run's images
_GREY = 128  # colour of tokens that are not decided yet

_GAP = 20  # pixels between runs and around them
_BAR = 12  # height in pixels of the bar that fills up
# Font sizes in pixels. A graph shows an animation at less than half its size.
_LABEL, _CLOCK, _BADGE, _RESULT = 34, 30, 34, 46


def time_lapse(
    images: Sequence[np.ndarray],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    duration: float,
    result: str = "",
) -> np.ndarray:
    """Draw the frames of an animation, in which all runs draw at once: for each its label, its images, a bar, and the
    passes and seconds so far. A finished run gets a badge, and the result stands below all of them in the end.

    The steps of a run share its measured seconds evenly. The slowest run takes ``duration``, and the others less in
    proportion. A token shows the cell of the final image once its step has ended. Given tokens of an edit are shown
    from the start.

    Args:
        images: the decoded images of a run, uint8 [N, H, W, 3]; one array a run.
        labels: one a run.
        reports: one a run, with seconds and the map "step".
        duration: seconds of the animation, without the last two seconds, which show the finished images.
        result: one line.

    Returns:
        uint8 [F, height, width, 3], for 12 frames a second.

    Raises:
        UserError: a report is missing, has no seconds or map, or is of another number of images.
    """
    runs = [_Run(*run) for run in zip(images, labels, reports, strict=True)]
    track = _Track(runs, result)
    slowest = max(run.report.seconds for run in runs)
    last = max(1, round(duration * FPS))

    frames = [track.frame(slowest * (k / last)) for k in range(last)]
    frames += [track.frame(slowest, ended=True)] * (1 + _HOLD)
    return np.stack(frames)


class _Track:
    """The runs side by side, at most two in a row."""

    def __init__(self, runs: Sequence[_Run], result: str):
        self.runs = runs
        self.result = result
        self.columns = min(2, len(runs))
        rows = math.ceil(len(runs) / self.columns)

        # 1. Sizes in pixels.
        side = max(max(run.sheet(0.0).shape[:2]) for run in runs)
        self.width = max(side, 360)
        self.labels = [wrap(run.label, _LABEL, self.width, 2) for run in runs]
        self.label_height = max(map(len, self.labels)) * line_height(_LABEL)
        self.image_height = max(run.sheet(0.0).shape[0] for run in runs)
        self.height = self.label_height + self.image_height + _GAP // 2 + _BAR + line_height(_CLOCK)

        # 2. What stays the same in all frames.
        below = line_height(_RESULT) if result else 0
        self.whole_width = self.columns * (self.width + _GAP) + _GAP
        self.empty = Canvas(self.whole_width, rows * (self.height + _GAP) + _GAP + below)
        for i, lines in enumerate(self.labels):
            x, y = self._corner(i)
            for n, line in enumerate(lines):
                self.empty.write(x, y + n * line_height(_LABEL) - _GAP // 4, line, _LABEL)

    def _corner(self, i: int) -> tuple[int, int]:
        """The top left corner of a run."""
        row, column = divmod(i, self.columns)
        return _GAP + column * (self.width + _GAP), _GAP + row * (self.height + _GAP)

    def frame(self, clock: float, ended: bool = False) -> np.ndarray:
        """The runs after ``clock`` seconds, uint8 [H, W, 3]; with the result if all have ended."""
        canvas = self.empty.copy()
        for i, run in enumerate(self.runs):
            self._draw(canvas, run, clock, *self._corner(i))

        if ended and self.result:
            room = self.whole_width - 2 * _GAP
            size = min(_RESULT, int(_RESULT * room / text_width(self.result, _RESULT)))
            top = canvas.image.height - _GAP - line_height(_RESULT)
            canvas.write(self.whole_width / 2, top, self.result, size, Ink.ACCENT, before=0.5)
        return canvas.pixels

    def _draw(self, canvas: Canvas, run: _Run, clock: float, x: int, y: int) -> None:
        """Draw what moves of a run with this corner."""
        finished = clock >= run.report.seconds
        right = x + self.width

        # 1. The images, and the badge on them.
        sheet = run.sheet(clock)
        y += self.label_height
        canvas.paste(sheet, x + (self.width - sheet.shape[1]) // 2, y)
        if finished:
            _draw_badge(canvas, x + self.width / 2, y + sheet.shape[0], "finished")

        # 2. The bar.
        y += self.image_height + _GAP // 2
        end = x + round(self.width * run.ended(clock) / run.steps)
        canvas.draw.rectangle((x, y, right - 1, y + _BAR - 1), Ink.PANEL)
        if end > x:
            canvas.draw.rectangle((x, y, end - 1, y + _BAR - 1), Ink.ACCENT)

        # 3. Passes and seconds.
        y += _BAR
        seconds = f"{min(clock, run.report.seconds):.2f} s"
        if finished and run.report.first_run:
            seconds = f"{seconds} ({FIRST_RUN})"
        canvas.write(x, y, run.passes(clock), _CLOCK, Ink.TEXT, self.width - text_width(seconds, _CLOCK) - _GAP)
        canvas.write(right, y, seconds, _CLOCK, Ink.ACCENT if finished else Ink.QUIET, before=1)


def _draw_badge(canvas: Canvas, centre: float, bottom: float, text: str) -> None:
    """Draw a badge at the lower edge of an image."""
    half = text_width(text, _BADGE) / 2 + _GAP
    top = bottom - line_height(_BADGE) - _GAP
    box = (centre - half, top, centre + half, bottom - _GAP)
    canvas.draw.rounded_rectangle(box, radius=_GAP // 2, fill=Ink.ACCENT)
    canvas.write(centre, top + _BADGE * 0.1, text, _BADGE, Ink.BACKGROUND, before=0.5)


class _Run:
    """A run: its report, its images, reduced, and for every pixel the step of its token."""

    def __init__(self, images: np.ndarray, label: str, report: Report | None):
        known = report is not None and "step" in report.maps and report.maps["step"].max() >= 0
        if report is None or not known or not report.seconds > 0:
            raise UserError(
                f"report: the report of {label[:60]!r} does not say in which step each token was decided; connect the "
                "report output of the sampler that generated the image."
            )

        steps = report.maps["step"]
        if len(images) != len(steps):
            raise UserError(
                f"image: {label[:60]!r} holds {len(images)} images, but its report is for {len(steps)}; connect the "
                "image and the report of the same run."
            )

        self.label = label
        self.report = report

        # The images, enlarged or reduced so that their sheet has the side of a run.
        n, h, w, _ = images.shape
        scale = _SIDE / math.ceil(math.sqrt(n)) / max(h, w)
        h = max(1, round(h * scale))
        w = max(1, round(w * scale))
        self.images = np.stack([resize(image, w, h) for image in images])

        # The step of every pixel's token.
        rows = np.arange(h) * steps.shape[1] // h
        columns = np.arange(w) * steps.shape[2] // w
        self.step = steps[:, rows][:, :, columns, None]
        self.steps = int(steps.max()) + 1

    def ended(self, clock: float) -> float:
        """Steps that have ended after ``clock`` seconds, with the part of the next one."""
        return self.steps * min(1.0, clock / self.report.seconds)

    def at(self, clock: float) -> np.ndarray:
        """The images after ``clock`` seconds."""
        return np.where(self.step + 1 <= self.ended(clock), self.images, np.uint8(_GREY))

    def sheet(self, clock: float) -> np.ndarray:
        """:meth:`at` as one image."""
        return contact_sheet(self.at(clock))

    def passes(self, clock: float) -> str:
        """Passes of the transformer after ``clock`` seconds, "12 of 57 passes", in the end "57 passes"; "" if they were
        not counted.
        """
        total = self.report.counts.get("transformer_passes", 0)
        if not total:
            return ""

        so_far = int(total * self.ended(clock) / self.steps)
        return amount(total, "passes") if so_far == total else f"{so_far:,} of {amount(total, 'passes')}"
