"""Settings of CSpD; ``samplers/settings.py`` explains the arguments of a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....reports.record import Report
from ...settings import Removed, knob
from ..settings import MARBase, steps_at_once

# Each call of ``knob`` has the default and the tooltip first, then the range.


@dataclass(frozen=True)
class CSpDSettings(MARBase):
    """CSpD (arXiv 2411.11925): a small MAR model drafts tokens, and a large one verifies them."""

    # The default of the published code. It is now the factor draft_std_factor of PUBLISHED_RULE in rejection.py.
    removed: ClassVar[Mapping[str, Removed]] = {"inner_temperature": Removed(42.0)}

    # fmt: off
    draft_length: int = knob(8, "Number of AR steps that are drafted before the target verifies the drafts; with a "
        "higher number, the target runs less often, but more drafts are rejected. Usual: a sixteenth to an eighth of "
        "the AR steps.",
        low=1, high=256, step=1, symbol="gamma", unit="AR steps")
    prefill_ratio: float = knob(0.15, "Share of the AR steps that the target computes alone, at the beginning; higher "
        "is slower and closer to the target's image. Usual: 0.05 to 0.15; at 1, nothing is drafted.",
        low=0.0, high=1.0, step=0.01)
    mode: str = knob("published", "Rule by which drafts are accepted. published is the rule of the authors' code: it "
        "accepts about a quarter of the drafts on the demo, but is approximate. paper is the rule of the authors' "
        "text: it hardly ever accepts a draft. lossless keeps the distribution of the target's images exactly, but "
        "hardly ever accepts a draft, too. Usual: published.",
        choices=("published", "paper", "lossless"))
    alignment: bool = knob(True, "Used only if 'mode' is 'published'. Both models use the same noise for every "
        "token, so that the draft model and the target agree more often. When this is off, more drafts are rejected.",
        advanced=True)
    speculation: int = knob(0, "Only for mode 'lossless': the target drafts this many of its own diffusion "
        "steps and verifies them in one call, which does not change the distribution. Usual: 8; at 0 or 1, the target "
        "does not draft.",
        low=0, high=64, step=1, symbol="L", advanced=True,
        more="The other modes refuse any value above 1.")
    # fmt: on

    @property
    def speculation_window(self) -> int:
        return steps_at_once(self.speculation, self.temperature)

    @property
    def ar_steps_per_head_call(self) -> int:
        if self.mode == "paper":
            return self.draft_length + 1  # also the AR step after the drafts
        return self.draft_length

    @property
    def ar_steps_per_pass(self) -> int:
        # In mode published, one pass of the target verifies all drafts of a segment. This pass reads only the tokens
        # decided before the segment, so it has the batch rows of only one AR step.
        return 1 if self.mode == "published" else self.ar_steps_per_head_call

    def streams(self) -> dict[str, int]:
        # Without alignment, the target verifies with its own noise. Otherwise both models use the noise of the stream
        # "full", which super() declares.
        unaligned = self.mode == "published" and not self.alignment
        target_stream = {"target": self.diffusion_steps} if unaligned else {}
        return super().streams() | target_stream

    def prefill(self, steps: int) -> int:
        """Number of AR steps at the beginning in which the target samples all tokens itself. These are the AR steps 0
        to floor(``steps`` * prefill_ratio), as in the published code. ``steps``: number of all AR steps.
        """
        return min(steps, int(steps * self.prefill_ratio) + 1)

    @property
    def all_are_prefill(self) -> bool:
        """Whether the target samples all tokens of every AR step itself."""
        return self.prefill(self.steps) == self.steps

    @property
    def approximates(self) -> bool:
        return not (self.mode == "lossless" or self.all_are_prefill) or super().approximates

    def no_gain(self, report: Report) -> str:
        if self.all_are_prefill and self.speculation_window == 1 and not self.approximates:
            return (
                "Nothing was drafted, so MAR ran without acceleration: prefill_ratio covers all AR steps; reduce "
                "prefill_ratio."
            )
        return super().no_gain(report)

    @property
    def samples_differently(self) -> bool:
        verifies = self.mode == "lossless" and not self.all_are_prefill
        return verifies or self.speculation_window > 1 or super().samples_differently
