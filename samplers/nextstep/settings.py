"""Settings of NextStep's sampler; each field has a :class:`.Knob` with its help text and range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..annealing import Annealed
from ..settings import knob, speculation_knob
from .flow import EM0, ODE, SOLVERS

CONSTANT = "constant"
FALLING = "falling"
RISING = "rising"

# In each field: first the default and the tooltip, then the range.


@dataclass(frozen=True)
class NextStepSettings(Annealed):
    """Settings of NextStep (arXiv 2508.10711), with annealed diffusion steps (DiSA, arXiv 2505.20297)."""

    refused: ClassVar[Mapping[str, str]] = {
        "parallel": "parallel needs a model of discrete tokens, but NextStep generates one continuous token after "
        "another; lower diffusion_steps instead",
        "window": "ZipAR needs a model of discrete tokens, but NextStep generates one continuous token after another; "
        "lower diffusion_steps instead",
        "steps": "the size of the image sets the number of AR steps of a NextStep; set diffusion_steps instead",
    }

    # fmt: off
    diffusion_steps: int = knob(28, "Calls of the flow-matching head for every token; more is slower and cleaner. "
        "Usual: 28 for NextStep-1.1, 50 for NextStep-1.", low=1, high=1000, step=1)
    cfg: float = knob(7.5, "How closely the image follows the prompt; higher is more typical and less varied. Usual: "
        "7.5; at 1, guidance is off, which halves the work.", low=1.0, high=20.0, step=0.1)
    width: int | None = knob(None, "Width of the image in pixels, a multiple of 16. Usual: the width of one of the "
        "sizes (width x height) that the model was trained for; the node Load NextStep lists these sizes.",
        low=0, high=8192, step=16, full_size_value=512, unit="pixels")
    height: int | None = knob(None, "Height of the image in pixels, a multiple of 16. Usual: the height that belongs "
        "to the chosen width in the list of sizes of the node Load NextStep.",
        low=0, high=8192, step=16, full_size_value=512, unit="pixels")
    cfg_img: float = knob(1.0, "Used only with a condition from Image and Prompt: how closely the result follows the "
        "original image. Usual: 2 for NextStep-1-Large-Edit; at 1, cfg applies to both the original image and the "
        "prompt, and a third of the work is saved.",
        low=1.0, high=20.0, step=0.1, advanced=True,
        more="At *cfg* 1, *cfg_img* has no effect.")
    cfg_schedule: str = knob(CONSTANT, "constant uses cfg for all tokens; falling lowers guidance from cfg at the "
        "first token to nearly 1 at the last token, and rising raises guidance from cfg / 2 at the first token to "
        "nearly cfg at the last token. Usual: constant.",
        choices=(CONSTANT, FALLING, RISING), advanced=True,
        more="In the authors' code, one of the choices is named linear. In the code of NextStep-1 and in the model "
            "folder of NextStep-1.1, linear means *falling*. In the code from February 2026, linear means *rising*.")
    solver: str = knob(EM0, "How a token is sampled from noise: em is the method of NextStep-1's code, em0 is the "
                            "method of the code in NextStep-1.1's model folder, and sde, ode and cps are the methods "
                            "of the authors' code from February 2026. Usual: em0 for NextStep-1.1, em for "
                            "NextStep-1; ode adds no noise between its steps.", choices=SOLVERS, advanced=True)
    time_shift: float = knob(1.0, "Shifts the diffusion steps of every token; above 1, more of these steps are taken "
        "while the token is still noisy. Usual: 3.2 for NextStep-1-Large-Edit, and 1 for all other models.",
        low=0.01, high=100.0, step=0.1, symbol="k", advanced=True)
    use_norm: bool = knob(False, "Normalises every token as soon as it is sampled, so the language model and VAE "
        "Decode get normalised tokens. Usual: off for NextStep-1.1, on for NextStep-1.", advanced=True)
    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last token, which needs fewer steps than "
        "the first token (DiSA); lower is faster. Usual: a third of diffusion_steps; at the value of "
        "diffusion_steps, DiSA is off.",
        low=1, high=1000, step=1, full_size_value=28, same_as="diffusion_steps", advanced=True,
        more="This setting saves little time with NextStep. We have not measured how fewer steps change the quality of "
            "the image.")
    speculation: int = speculation_knob("0, which drafts nothing; speculation helps only if the calls are slow and cfg "
        "is low", head="flow-matching head",
        more="Few drafts are accepted at *cfg* 7.5. With *solver* *ode*, which adds no noise, *speculation* has no "
            "effect.")
    # fmt: on

    @property
    def uses_guidance(self) -> bool:
        """Whether guidance is on. With guidance, the language model also reads the negative text."""
        return self.cfg != 1

    @property
    def speculation_window(self) -> int:
        """Number of diffusion steps that speculation drafts at once; 1 if it drafts nothing."""
        return 1 if self.solver == ODE else max(1, self.speculation)

    def streams(self) -> dict[str, int]:
        return {"full": self.diffusion_steps}

    @property
    def samples_differently(self) -> bool:
        return self.speculation_window > 1 or super().samples_differently
