"""Settings of the samplers of blocks; see ``samplers/settings.py`` for what a field carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..annealing import Annealed
from ..settings import knob

# A field is its default and sentence, then its range.
# fmt: off


@dataclass(frozen=True)
class BlockSettings(Annealed):
    """BitDance (arXiv 2602.14041), with annealed diffusion steps (DiSA, arXiv 2505.20297)."""

    refused: ClassVar[Mapping[str, str]] = {
        "parallel": "exact parallel decoding is hopeless on a BitDance, where all bits of a block must agree with the "
            "guess, 512 to 2,048 of a 14B; lower diffusion_steps, or set diffusion_steps_end",
        "sampler": "a BitDance has one sampler, the stochastic one of its paper; the euler of the published code takes "
            "the prediction of the tokens for a velocity and is not here; leave it out",
        "steps": "the size of the image sets the number of blocks of a BitDance; set diffusion_steps",
    }

    diffusion_steps: int = knob(50, "Denoising steps for every block; more is slower and cleaner. Usual: 50 for "
        "prompts, 100 for ImageNet; 25 halves the time and may cost a little quality.", low=1, high=1000, step=1,
        more="A block takes one call more than it has diffusion steps.")
    cfg: float = knob(7.5, "How closely the image follows the class or prompt; higher is more typical and less "
        "varied. Usual: 7.5 for prompts, 3.2 to 6.1 for ImageNet; 1 turns guidance off and halves the work.",
        low=1.0, high=20.0, step=0.1,
        more="Published for ImageNet: 3.2, 3.9 and 6.1 for B with blocks of 1, 4 and 16 tokens, 4.0 for L and 4.55 "
        "for H.")
    width: int | None = knob(None, "Width of the image in pixels. Usual: width and height of a size that the model "
        "was trained for; Load BitDance lists these sizes.", low=8, high=8192, step=8, paper=1024, unit="pixels")
    height: int | None = knob(None, "Height of the image in pixels. Usual: width and height of a size that the "
        "model was trained for; Load BitDance lists these sizes.", low=8, high=8192, step=8, paper=1024, unit="pixels")
    cfg_schedule: str = knob("constant", "constant uses cfg from the start, linear increases guidance from 1 to cfg "
        "from the first block to the last. Usual: constant for prompts, linear for ImageNet.",
        choices=("constant", "linear"), advanced=True,
        more="With *linear*, the last block has nearly *cfg*.")
    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last block, which needs fewer than the "
        "first block (DiSA); lower is faster. Usual: a fifth of diffusion_steps; set it to diffusion_steps to turn "
        "it off.",
        low=1, high=1000, step=1, paper=50, advanced=True)
    speculation: int = knob(0, "Draft this many diffusion steps at once and verify them in one call of the "
        "diffusion head; you get a different image, sampled from exactly BitDance's distribution. Usual: 8 on a "
        "GPU; 0 turns it off.",
        low=0, high=64, step=1, symbol="L", advanced=True,
        more="A higher number means fewer, larger calls, which may be slower on a CPU with many images. The more "
            "*diffusion_steps*, the more drafts are accepted. At 1, it is also off.")

    @property
    def guides(self) -> bool:
        """Whether guidance is applied, for which the null branch is evaluated."""
        return self.cfg != 1

    @property
    def window(self) -> int:
        """Diffusion steps that are drafted at once; 1 for none."""
        return max(1, self.speculation)

    def streams(self) -> dict[str, int]:
        return {"full": self.diffusion_steps}

    def exact(self, side: int) -> bool:
        return self.window == 1 and not self.approximates

    def lossless(self) -> bool:
        return self.window > 1 and not self.approximates
