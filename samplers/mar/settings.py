"""Settings of the MAR sampler, and the settings that the other MAR samplers share with it.

``samplers/settings.py`` explains the arguments of ``knob``, which describe a setting. Besides the settings, samplers
read methods and properties of :class:`MARBase` and :class:`.Guarantees`. Derived classes override some of them:

======================  ======================================================================
method or property      classes that override it
======================  ======================================================================
streams                 FastHybridSettings, CSpDSettings
speculation_window      SpeculationSettings, CSpDSettings
limits_first_timestep   DiSASettings
orders                  GtRSettings
masked_after_steps      GtRSettings
ar_steps_per_head_call  FastHybridSettings, CSpDSettings
ar_steps_per_pass       CSpDSettings
approximates            Annealed, GtRSettings, FastHybridSettings, CSpDSettings, CacheSettings
samples_differently     SpeculationSettings, CSpDSettings
no_gain                 FastHybridSettings, CSpDSettings, CacheSettings
======================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..annealing import Annealed
from ..settings import HeadGuarantees, Removed, knob, speculation_knob
from .schedule import ORDERS, masked_after

# If DiSA gives the last tokens fewer than FEW_STEPS diffusion steps, and the user has not set t_max, the diffusion of
# all tokens starts at timestep SAFE_FIRST_TIMESTEP or below, as in the code of DiSA's authors. The reason: if a
# diffusion with fewer than FEW_STEPS steps started at timestep 999, its first step would multiply the head's error by
# more than 1000 (tables.py).
FEW_STEPS = 30
SAFE_FIRST_TIMESTEP = 950

# In each call of ``knob``: first the default and the tooltip, then the range.


@dataclass(frozen=True)
class MARBase(HeadGuarantees):
    """Settings that all MAR samplers have (Li et al. 2024)."""

    fewest_steps: ClassVar[int] = 1  # fewest AR steps that are valid with the defaults of all other settings

    # fmt: off
    steps: int = knob(64, "Number of AR steps (the steps in which the tokens of the image are decided); more is slower "
        "and finer. Usual: 64 for full-size models, 16 to 64 for the demo.",
        low=1, high=4096, step=1)
    diffusion_steps: int = knob(100, "Denoising steps for every token; more is slower and cleaner. Usual: 100; if you "
        "use fewer than 30, set t_max to 950 or less.",
        low=1, high=1000, step=1)
    cfg: float = knob(3.0, "How closely the image follows the class or prompt; higher is more typical and less varied. "
        "Usual: 2.9 to 3.3; at 1, guidance is off, which halves the work.",
        low=1.0, high=20.0, step=0.1)
    cfg_schedule: str = knob("linear", "With linear, guidance increases from 1 to cfg while the tokens are decided, as "
        "in the paper. With constant, guidance is cfg at every AR step.",
        choices=("linear", "constant"), advanced=True)
    temperature: float = knob(1.0, "Amount of noise in every diffusion step; lower is smoother and less varied. "
        "Usual: 1.",
        low=0.0, high=2.0, step=0.01, advanced=True,
        more="The demo's file recommends 0.8.")
    order: str = knob("random", "Order in which the tokens are decided. Usual: random, a new order for every image, as "
        "in training; raster goes row by row. With halton, tokens that are decided one after another lie far apart.",
        choices=("random", "raster", "halton"), advanced=True,
        more="*raster* gives worse images than *random*.")
    t_max: int | None = knob(None, "Diffusion timestep from which denoising starts; a lower timestep has less noise. "
        "Usual: the model's own value, which is 999 for official models and 950 for the demo; 950 prevents coloured "
        "squares if you use few diffusion steps or half precision.",
        low=1, high=999, step=1, full_size_value=999, advanced=True)
    # fmt: on

    # Samplers use the following methods and properties. A subclass overrides the ones whose results depend on the
    # subclass's own settings.

    def streams(self) -> dict[str, int]:
        return {"full": self.diffusion_steps}

    @property
    def uses_guidance(self) -> bool:
        """Whether guidance is on. If so, the model also computes the null branch, which reads no class or prompt."""
        return self.cfg != 1

    @property
    def speculation_window(self) -> int:
        """Number of diffusion steps that speculation drafts at once; 1 if nothing is drafted."""
        return 1

    @property
    def limits_first_timestep(self) -> bool:
        """Whether the diffusion must start at timestep SAFE_FIRST_TIMESTEP or below if ``t_max`` is not set."""
        return False

    def orders(self, random_orders: Tensor) -> Tensor:
        """The positions of each image in the order in which a sampler decides them, int64 [B, L]. ``random_orders``:
        the positions of each image in a random order, int64 [B, L].
        """
        return ORDERS[self.order](random_orders)

    def masked_after_steps(self, tokens: int, regenerated: Tensor | None = None) -> list[int]:
        """Number of masked tokens after each AR step, for an image of ``tokens`` tokens.

        ``regenerated``: in an edit, the tokens to decide, bool [B, L]; their number is the same in every image. If
        this number is below ``steps``, the run has one AR step for each of these tokens.

        Raises:
            UserError: without an edit, there are more AR steps than tokens.
        """
        if regenerated is None:
            return masked_after(tokens, self.steps)

        masked = int(regenerated[0].sum())
        return masked_after(masked, min(self.steps, masked))

    # The estimate of GPU memory (runs/memory/mar.py) uses the following properties.

    @property
    def ar_steps_per_head_call(self) -> int:
        """Largest number of AR steps whose tokens one call of the diffusion head computes."""
        return 1

    @property
    def ar_steps_per_pass(self) -> int:
        """Largest number of AR steps that one pass of the transformer computes. Each AR step has its own batch rows."""
        return 1


@dataclass(frozen=True)
class DiSASettings(Annealed, MARBase):
    """DiSA (arXiv 2505.20297): the number of diffusion steps falls from the first to the last AR step.

    The settings of samplers with DiSA inherit from this class.
    """

    removed: ClassVar[Mapping[str, Removed]] = {"diffusion_steps_curve": Removed("linear")}

    # fmt: off
    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last tokens, which need fewer steps than "
        "the first tokens (DiSA); lower is faster. Usual: a tenth of diffusion_steps; at the value of "
        "diffusion_steps, DiSA is off.",
        low=1, high=1000, step=1, full_size_value=100, same_as="diffusion_steps", advanced=True,
        more="If you set fewer than 30 steps here, also set *t_max* to 950 or less.")
    # fmt: on

    @property
    def limits_first_timestep(self) -> bool:
        last_steps = self.diffusion_steps_end
        return last_steps is not None and last_steps < FEW_STEPS


def steps_at_once(speculation: int, temperature: float) -> int:
    """Number of diffusion steps that are drafted at once at this value of the setting ``speculation``; 1 if nothing is
    drafted. At temperature 0, nothing is drafted, because the steps have no noise.
    """
    return max(1, speculation) if temperature > 0 else 1


@dataclass(frozen=True)
class SpeculationSettings(MARBase):
    """Speculation: the sampler drafts several diffusion steps, and verifies them in one call of the diffusion head.

    The settings of samplers with speculation inherit from this class.
    """

    # fmt: off
    speculation: int = speculation_knob("8 on a GPU; at 0 or 1, nothing is drafted",
        more="With a higher number, the diffusion head runs less often, but computes more at once, which is slower on "
            "a CPU.")
    # fmt: on

    @property
    def speculation_window(self) -> int:
        return steps_at_once(self.speculation, self.temperature)

    @property
    def samples_differently(self) -> bool:
        return self.speculation_window > 1 or super().samples_differently


@dataclass(frozen=True)
class MARSettings(SpeculationSettings, DiSASettings):
    """Settings of the MAR sampler: first MAR's own fields, then DiSA's fields, then the field of speculation."""
