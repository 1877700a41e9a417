"""The work of several runs of one method: counts added up, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Counts of a model and its draft model together, to the draft model's part of them.
OF_DRAFT = {"transformer_passes": "draft_passes", "head_calls": "draft_head_calls"}


@dataclass(frozen=True)
class Work:
    """Counts of runs, added up."""

    runs: int = 0
    images: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)  # by the names of record.COUNTS

    @staticmethod
    def of(runs: Iterable[tuple[int, Mapping[str, int]]]) -> Work:
        """The work of runs, each with its number of images and its counts."""
        number = 0
        images = 0
        total: dict[str, int] = {}
        for own, counts in runs:
            number += 1
            images += own
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count

        return Work(number, images, total)

    def a_run(self, name: str) -> float | None:
        """Mean of a count over the runs; None if none has it."""
        return self.counts[name] / self.runs if name in self.counts else None

    def own_a_run(self, name: str) -> float | None:
        """As :meth:`a_run`, without a draft model's part."""
        mean = self.a_run(name)
        return None if mean is None else mean - (self.a_run(OF_DRAFT.get(name, "")) or 0)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts as a fraction of verified drafts, 0..1; None if no draft was verified."""
        accepted = self.counts.get("accepted", 0)
        verified = accepted + self.counts.get("rejected", 0)
        return accepted / verified if verified else None

    @property
    def redraws(self) -> float | None:
        """Mean redraws of a rejected token (CSpD), the kept one included; None if none was redrawn."""
        rejected = self.counts.get("rejected", 0)
        return self.counts["redraws"] / rejected if rejected and "redraws" in self.counts else None
