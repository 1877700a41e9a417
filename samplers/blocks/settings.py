"""Settings of BitDance's sampler. Each field has a :class:`.Knob` with its help text and range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..annealing import Annealed
from ..settings import knob, speculation_knob

# In each field: first the default and the tooltip, then the range.


@dataclass(frozen=True)
class BlockSettings(Annealed):
    """Settings of BitDance (arXiv 2602.14041), with annealed diffusion steps (DiSA, arXiv 2505.20297)."""

    refused: ClassVar[Mapping[str, str]] = {
        "parallel": "exact parallel decoding does not help a BitDance, because a guessed block is accepted only if "
        "all its bits are right (512 to 2,048 bits in a 14B model); lower diffusion_steps, or set diffusion_steps_end",
        "sampler": "FastAR has only the stochastic sampler of BitDance's paper, and not the euler sampler of the "
        "published code, which uses the network's prediction of the tokens as a velocity; leave this setting out",
        "steps": "the size of the image sets the number of blocks of a BitDance; set diffusion_steps instead",
    }

    # fmt: off
    diffusion_steps: int = knob(50, "Denoising steps for every block; more is slower and cleaner. Usual: 50 for "
        "prompts, 100 for ImageNet's classes; 25 instead of 50 halves the time and may cost a little quality.",
        low=1, high=1000, step=1)
    cfg: float = knob(7.5, "How closely the image follows the class or prompt; higher is more typical and less "
        "varied. Usual: 7.5 for prompts, 3.2 to 6.1 for ImageNet's classes; at 1, guidance is off, which halves the "
        "work.",
        low=1.0, high=20.0, step=0.1)
    width: int | None = knob(None, "Width of the image in pixels. Usual: the width of one of the sizes (width x "
        "height) that the model was trained for; the node Load BitDance lists these sizes.",
        low=8, high=8192, step=8, full_size_value=1024, unit="pixels")
    height: int | None = knob(None, "Height of the image in pixels. Usual: the height that belongs to the chosen width "
        "in the list of sizes of the node Load BitDance.",
        low=8, high=8192, step=8, full_size_value=1024, unit="pixels")
    cfg_schedule: str = knob("constant", "With constant, guidance is cfg from the start; with linear, guidance "
        "increases from 1 at the first block to nearly cfg at the last block. Usual: constant for prompts, linear for "
        "ImageNet's classes.",
        choices=("constant", "linear"), advanced=True)
    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last block, which needs fewer steps than "
        "the first block (DiSA); lower is faster. Usual: a fifth of diffusion_steps; at the value of "
        "diffusion_steps, DiSA is off.",
        low=1, high=1000, step=1, full_size_value=50, same_as="diffusion_steps", advanced=True)
    speculation: int = speculation_knob("8 on a GPU; at 0 or 1, nothing is drafted",
        more="With a higher number, the diffusion head runs less often, but computes more at once, which may be "
            "slower on a CPU with many images.")
    # fmt: on

    @property
    def uses_guidance(self) -> bool:
        """Whether guidance is on. With guidance, the transformer also runs on the null condition."""
        return self.cfg != 1

    @property
    def speculation_window(self) -> int:
        """Number of diffusion steps that speculation drafts at once; 1 if it drafts nothing."""
        return max(1, self.speculation)

    def streams(self) -> dict[str, int]:
        # The stream "null" is left out: the null branch needs noise of its own for only one block, which takes little
        # memory.
        return {"full": self.diffusion_steps}

    @property
    def samples_differently(self) -> bool:
        return self.speculation_window > 1 or super().samples_differently
