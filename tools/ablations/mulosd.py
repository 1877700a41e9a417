"""Ablation tables of MuLo-SD on the demo's two LlamaGens; those on its Tar are in ``tar.py``.

The comparisons are those of the paper ("Multi-Scale Local Speculative Decoding for Image Generation", CVPR 2026, arXiv
2601.05149): acceptance threshold, treatment of rejections, pooling of similar codes, parallel resampling of islands,
and the up-sampler. Rows of one comparison share tau, or the acceptance rate.

The images of a batch share their passes, as many as the image with the most waves needs. The column *forwards* is the
mean number of passes of an image sampled alone, computed from the maps of the report.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ...reports.record import Report
from ...reports.table import figure
from ...samplers.registry import find
from ...samplers.tokens.settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings, rows_at_once
from ...samplers.tokens.upsampling import UpSampling
from ..training.quality import percent
from ..training.token_recipes import GPT_HIGH, GPT_LOW
from .tables import Result, Row
from .tokens import TokenBench

# Threshold of rows that vary another setting, and acceptance rate of rows that are compared at equal speed.
TAU, KEPT = 0.3, 0.7
_TAUS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_SHARES = (0.5, 0.7, 0.9)
# Thresholds for rejections that discard the rest of the draft.
_LOW_TAUS = (0.01, 0.001)
_NEIGHBOURS = (0, 1, 4, 16, 64)


def rows(serial: Row) -> tuple[Row, ...]:
    """The rows of a table, on the model of ``serial``, the first one."""

    def mulosd(title: str, **settings: Any) -> Row:
        return Row(title, "mulosd", {"tau": TAU, **settings}, serial.model)

    return (
        serial,
        *(Row(f"ZipAR alone, window {w}", "zipar", {"window": w}, serial.model) for w in (8, 4, 2)),
        mulosd("the enlarged draft (tau 0)", tau=0.0),
        *(mulosd(f"tau {t:g}", tau=t) for t in _TAUS),
        mulosd("all drawn again, row by row (tau 1.01: exact)", tau=1.01, resample_window=0),
        *(mulosd(f"keep {100 * share:g} %", acceptance_target=share) for share in _SHARES),
        mulosd("the rest discarded", repair=SUFFIX),
        *(mulosd(f"the rest discarded, tau {t:g}", repair=SUFFIX, tau=t) for t in _LOW_TAUS),
        *(mulosd(f"local, l = {radius}", expansion=radius) for radius in (0, 1, 2)),
        *(mulosd(f"k = {k}", neighbours=k) for k in _NEIGHBOURS),
        *(mulosd(f"k = {k}, keep {100 * KEPT:g} %", neighbours=k, acceptance_target=KEPT) for k in _NEIGHBOURS),
        mulosd("one token after another", resample_order=ONE_BY_ONE, resample_window=0),
        mulosd("islands at once, each token by token", resample_window=0),
        *(mulosd(f"islands at once, window {w}", resample_window=w) for w in (4, 2, 1)),
        *(mulosd(f"drafting window {w}" if w else "draft token by token", draft_window=w) for w in (0, 4, 2)),
        *(mulosd(f"drafts of {n} rows", draft_rows=n) for n in (4, 2)),
    )


def forwards_alone(report: Report, settings: Any, small: int) -> np.ndarray:
    """Transformer passes of each image of a batch if it is sampled
    alone, int64 [B], of draft (``small`` cells a side) and target.
    """
    passes, step = report.counts["transformer_passes"], report.maps["step"]
    if not isinstance(settings, MuLoSDSettings):
        return np.full(len(step), passes)
    grid = step.shape[1]
    each = rows_at_once(settings, small) * (grid // small)

    # A cycle resamples in one pass per wave, except the first, which is the verification pass.
    cycles = np.array_split(report.maps["waves"], range(each, grid, each), axis=1)
    more = np.stack([rows.max(axis=(1, 2)).clip(min=0) for rows in cycles]).astype(np.int64)

    return passes - more.max(axis=1).sum() + more.sum(axis=0)


class RepairBench(TokenBench):
    """Rows of a token model with a smaller draft model."""

    tables = {}
    # Checkpoint and grid of the draft model.
    drafter: ClassVar[str]
    small: ClassVar[int]

    def needs(self, row: Row) -> tuple[str, ...]:
        return (*super().needs(row), *((self.drafter,) if find(row.sampler).needs_codes else ()))

    def companions(self, row: Row, settings: Any) -> dict[str, Any]:
        if not find(row.sampler).needs_codes:
            return {}
        return {"draft": self.model(self.drafter), "up_sampler": UpSampling(self.vq)}

    def more(self, row: Row, made: Any, reports: Sequence[Report], result: Result) -> dict[str, Any]:
        """Mean passes of an image sampled alone, of both models and of the draft; the share of resampled tokens and the
        mean number of islands an image, None for other samplers.
        """
        forwards = np.concatenate([forwards_alone(report, made, self.small) for report in reports])
        drafted: float | None = None
        if isinstance(made, MuLoSDSettings):
            drafted = reports[0].counts.get("draft_passes", 0)  # the same for all batches
        again, islands, counts = None, None, result.counts
        if "islands" in counts:
            again = (counts["rejected"] + counts["expanded"]) / (counts["accepted"] + counts["rejected"])
            islands = counts["islands"] / len(forwards)

        mean = float(forwards.mean())

        return {"model": row.model, "forwards": mean, "draft_forwards": drafted, "again": again, "islands": islands}

    def work(self, result: Result) -> dict[str, str]:
        more = result.more
        kept = {"accepted %": percent(result.acceptance), "drawn again %": percent(more["again"])}
        names = {"islands": "islands", "forwards": "forwards", "draft_forwards": "of the draft"}
        counts = {heading: figure(more[name], ".1f") for name, heading in names.items()}
        return {**kept, **counts, "s an image": result.seconds_an_image}


class LlamaGenRepairBench(RepairBench):
    """Rows of the demo's two LlamaGens."""

    tables = {"mulosd-llamagen": rows(Row("LlamaGen", "llamagen", {}, GPT_HIGH.name))}
    drafter, small = GPT_LOW.name, GPT_LOW.grid
