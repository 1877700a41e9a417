"""Settings of NextStep's sampler; see ``samplers/settings.py`` for what a field carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..annealing import Annealed
from ..settings import knob
from .flow import EM0, ODE, SOLVERS

CONSTANT = "constant"
FALLING = "falling"
RISING = "rising"

# In each field: first the default and the help sentence, then the range.
# fmt: off


@dataclass(frozen=True)
class NextStepSettings(Annealed):
    """NextStep (arXiv 2508.10711), with annealed diffusion steps (DiSA, arXiv 2505.20297)."""

    refused: ClassVar[Mapping[str, str]] = {
        "parallel": "parallel needs a model of discrete tokens, but NextStep draws one continuous token after another; "
            "lower diffusion_steps",
        "window": "ZipAR needs a model of discrete tokens, but NextStep draws one continuous token after another; "
            "lower diffusion_steps",
        "steps": "the size of the image sets the number of AR steps of a NextStep; set diffusion_steps",
    }

    diffusion_steps: int = knob(28, "Calls of the flow-matching head for every token; more is slower and cleaner. "
        "Usual: 28 for NextStep-1.1, 50 for NextStep-1.", low=1, high=1000, step=1)
    cfg: float = knob(7.5, "How closely the image follows the prompt; higher is more typical and less varied. Usual: "
        "7.5; 1 turns guidance off and halves the work.", low=1.0, high=20.0, step=0.1)
    width: int | None = knob(None, "Width of the image in pixels, a multiple of 16. Usual: width and height of a size "
        "that the model was trained for; Load NextStep lists these sizes.", low=2, high=8192, step=2, paper=512,
        unit="pixels")
    height: int | None = knob(None, "Height of the image in pixels, a multiple of 16. Usual: width and height of a "
        "size that the model was trained for; Load NextStep lists these sizes.", low=2, high=8192, step=2, paper=512,
        unit="pixels")
    cfg_img: float = knob(1.0, "How closely the image stays to the image that is changed, beside cfg; only with a "
        "condition from Image and Prompt. Usual: 2 for NextStep-1-Large-Edit; 1 guides by both together and saves a "
        "third of the work.", low=1.0, high=20.0, step=0.1, symbol="cfg_img", advanced=True,
        more="Above 1 there is a third branch of guidance, which reads the image with the negative text. Without "
        "guidance (*cfg* 1) and without an image it has no effect, and the report says so.")
    cfg_schedule: str = knob(CONSTANT, "constant uses cfg for all tokens, falling lowers it from the first token to "
        "nearly 1 at the last, rising raises it from cfg / 2 to cfg. Usual: constant.",
        choices=(CONSTANT, FALLING, RISING), advanced=True,
        more="*falling* is the program of NextStep-1 and of NextStep-1.1's folder, *rising* that of February 2026; "
        "both call it linear.")
    solver: str = knob(EM0, "How a token is sampled from noise: em is NextStep-1's program, em0 that of NextStep-1.1's "
        "folder, and sde, ode and cps are those of February 2026. Usual: em0 for 1.1, em for 1; ode adds no noise "
        "between its steps.", choices=SOLVERS, advanced=True)
    time_shift: float = knob(1.0, "Moves the steps of a token; above 1 more of them are near the noise. Usual: 1, and "
        "3.2 for NextStep-1-Large-Edit.", low=0.01, high=100.0, step=0.1, symbol="k", advanced=True)
    use_norm: bool = knob(False, "Normalise every token before it is decoded and read. Usual: off for NextStep-1.1, on "
        "for NextStep-1.", advanced=True)
    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last token, which needs fewer than the first "
        "token (DiSA); lower is faster. Usual: a third of diffusion_steps; set it to diffusion_steps to turn it off.",
        low=1, high=1000, step=1, paper=28, same_as="diffusion_steps", advanced=True,
        more="The head takes 11 to 40 % of the time, so fewer steps gain less than with a MAR. Nobody has "
        "measured the quality.")
    speculation: int = knob(0, "Draft this many diffusion steps at once and verify them in one call of the "
        "flow-matching head; you get a different image, sampled from exactly NextStep's distribution. Usual: 0, which "
        "turns it off; it pays only where the calls are slow and cfg is low.",
        low=0, high=64, step=1, symbol="L", advanced=True,
        more="Guidance multiplies the differences between drafts and predictions, so at *cfg* 7.5 few drafts are "
        "accepted. At 1, it is also off. With *ode*, which adds no noise, it does nothing.")

    @property
    def guides(self) -> bool:
        """Whether guidance is applied, for which the negative branch is evaluated."""
        return self.cfg != 1

    @property
    def window(self) -> int:
        """Diffusion steps that are drafted at once; 1 for none."""
        return 1 if self.solver == ODE else max(1, self.speculation)

    def streams(self) -> dict[str, int]:
        return {"full": self.diffusion_steps}

    @property
    def redraws(self) -> bool:
        return self.window > 1
