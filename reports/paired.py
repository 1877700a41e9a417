"""Quality of every run of a comparison against its baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .drawing import check_batch
from .quality import DISTRIBUTION, OTHER_MODEL, OTHER_SEED, Quality, measure
from .record import Baseline, Report, against

# Between a target's name and its draft model's in the model name of a report.
DRAFTED_BY = ", drafted by "


def qualities(
    pictures: Sequence[np.ndarray],
    reports: Sequence[Report | None],
    baseline: Baseline,
    lossless: Callable[[Report], bool] = lambda report: False,
) -> list[Quality | None]:
    """Quality of every cell against its baseline; None for baselines and for cells without one.

    Args:
        pictures: one uint8 batch [N, H, W, 3] per cell.
        reports: one per cell, None where no report exists.
        baseline: as in :func:`.record.against`.
        lossless: whether a run keeps only the distribution of its baseline's pictures.

    Raises:
        UserError: a cell is not a uint8 batch.
    """
    bases = [baseline] * len(pictures) if isinstance(baseline, int) else list(baseline)
    out: list[Quality | None] = []
    for i, (base, report, other) in enumerate(zip(bases, reports, against(reports, bases), strict=True)):
        if base is None or base == i:
            out.append(None)
            continue
        own, first = (check_batch(pictures[k], f"picture {k + 1}") for k in (i, base))
        out.append(measure(own, first, _word(report, other, lossless)))
    return out


def _word(report: Report | None, baseline: Report | None, lossless: Callable[[Report], bool]) -> str:
    """The word in place of the figures, "" if they apply."""
    if report is None or baseline is None:
        return ""
    if report.model.partition(DRAFTED_BY)[0] != baseline.model.partition(DRAFTED_BY)[0]:
        return OTHER_MODEL
    if report.seed != baseline.seed:
        return OTHER_SEED
    return DISTRIBUTION if lossless(report) or lossless(baseline) else ""
