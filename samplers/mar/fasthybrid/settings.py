"""Settings of FastHybrid; ``samplers/settings.py`` explains the arguments of a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....reports.record import Report
from ...settings import Removed, knob
from ..settings import DiSASettings

# In each call of ``knob``: first the default and the tooltip, then the range.


@dataclass(frozen=True)
class FastHybridSettings(DiSASettings):
    """FastHybrid (CVPR 2026): lookahead drafts, verification by similarity, guided few-step refinement."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "align_lookaheads": Removed(False, "the images of a batch advance independently, in fewer head calls"),
    }

    # fmt: off
    lookahead: int = knob(8, "Draft the tokens of this many AR steps together; more is faster, but fewer drafts are "
        "accepted. Usual: 7 to 9 for 64 AR steps; at 0 or 1, nothing is drafted.",
        low=0, high=256, step=1, symbol="k",
        more="If a full-size model takes 32 AR steps, use 4.")
    threshold: float = knob(0.8, "A draft is accepted if the cosine similarity of two conditions reaches this "
        "value: the condition from which the draft was sampled, and the token's actual condition, which the "
        "transformer computes later. A higher value is slower and closer to MAR's image. Usual: 0.8 for full-size "
        "models, 0.9 to 0.99 for the demo; above 1, no draft is accepted.",
        low=-1.0, high=1.01, step=0.01, symbol="lambda")
    guided_steps: int = knob(10, "Denoising steps for an accepted draft; more is slower and finer. Usual: 10.",
        low=1, high=1000, step=1, symbol="T_g")
    guidance_schedule: str = knob("cos", "How the influence of the draft changes over the guided steps: the influence "
        "decreases with cos, linear-down and square, and increases with linear-up; with none, the draft has no "
        "influence. Usual: cos, as in the paper.",
        choices=("cos", "linear-down", "linear-up", "square", "none"), advanced=True)
    accepted: str = knob("refine", "What happens to an accepted draft: refine improves it in a few guided steps, and "
        "renoise adds noise to it and denoises it again. With keep, the draft stays as it is; the run is "
        "faster, but textures show artefacts. Usual: refine.",
        choices=("refine", "renoise", "keep"), advanced=True,
        more="In the paper's comparison, *renoise* is a little worse than *refine*, and slower.")
    lookahead_start: int = knob(0, "Number of AR steps at the beginning without drafts; more is slower and closer to "
        "MAR's image. Usual: 0, as in the paper, or an eighth to a third of the AR steps.",
        low=0, high=4096, step=1, unit="AR steps", advanced=True,
        more="At 0, the sampler is faster, but often gives a clearly different image of the same subject.")
    denoise: float = knob(0.9, "Used only if 'accepted' is 'renoise'. Share of the guided steps that FastHybrid runs; "
        "before these steps, the draft gets as much noise as these steps remove. Lower is faster and stays closer to "
        "the draft. Usual: 0.9, as in the paper.",
        low=0.0, high=1.0, step=0.01, advanced=True)
    # fmt: on

    def streams(self) -> dict[str, int]:
        guided = {"guided": self.guided_steps} if self.lookahead > 1 else {}
        return super().streams() | guided

    @property
    def ar_steps_per_head_call(self) -> int:
        return max(1, self.lookahead)  # a full diffusion samples all AR steps of a lookahead

    def no_gain(self, report: Report) -> str:
        if not self.approximates:  # no draft can be accepted, and DiSA is off too
            return (
                "No draft could be accepted, so MAR ran without acceleration; set lookahead to 2 or more, "
                "lookahead_start to at most steps - 2, and threshold to at most 1."
            )
        return super().no_gain(report)

    def reach(self, step: int) -> int:
        """Number of AR steps in a lookahead that starts at AR step ``step``, including ``step`` itself; 1 if the
        lookahead drafts nothing.
        """
        return max(1, self.lookahead) if step >= self.lookahead_start else 1

    @property
    def approximates(self) -> bool:
        # A lookahead drafts the tokens of later AR steps, so a lookahead from the last AR step drafts nothing.
        drafts = self.lookahead > 1 and self.lookahead_start < self.steps - 1
        return (drafts and self.threshold <= 1) or super().approximates
