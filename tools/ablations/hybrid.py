"""Ablation tables of the MAR samplers on the demo's hybrid, with held-out prompts.

Prompts are defined in ``captions.py``, figures in ``quality.py``.
"""

from functools import cached_property

from ...model_loaders.hybrid import load_hybrid
from ...model_loaders.networks.mar import MARModel
from ...samplers import presets
from ...samplers.conditioning import PromptCondition
from ...samplers.registry import SAMPLERS
from ..training.hybrid_recipe import DEFAULTS, NAME
from .mar import LAZY, MARBench
from .tables import BATCH, Ground, Row, Table
from .tar import PromptGround

_COMMON = {name: DEFAULTS[name] for name in ("steps", "diffusion_steps", "cfg", "temperature")}
_FAST = {name: DEFAULTS[name] for name in ("lookahead", "guided_steps")}


def _preset(sampler: str, preset: str) -> Row:
    entry = SAMPLERS[sampler]
    return Row(f"{entry.title}, {preset}", sampler, presets.values(entry.settings, preset, demo=True))


TABLES: dict[str, Table] = {
    "hybrid": (
        Row("MAR", "mar", {}),
        Row("DiSA 50 to 5", "mar", {"diffusion_steps_end": 5}),
        *(Row(f"FastHybrid, RG-{v:g}", "fasthybrid", {**_FAST, "threshold": v}) for v in (0.9, 0.95, 0.99)),
        Row("LazyMAR", "lazymar", LAZY),
        Row("FastHybrid, RG-0.95 + LazyMAR", "fasthybrid+lazymar", {**_FAST, "threshold": 0.95, **LAZY}),
    ),
    "hybrid-presets": (
        Row("MAR", "mar", {}),
        *(
            _preset(name, preset)
            for name in ("fasthybrid", "lazymar", "fasthybrid+lazymar")
            for preset in ("balanced", "fast")
        ),
    ),
}


class HybridBench(MARBench):
    """Rows of the demo's hybrid."""

    tables, common = TABLES, _COMMON
    ground: PromptGround

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32", batch: int = BATCH):
        super().__init__(PromptGround(ground), device, dtype, batch)

    def needs(self, row: Row) -> tuple[str, ...]:
        return NAME, "kl"

    @cached_property
    def mar(self) -> MARModel:
        """The model."""
        return load_hybrid(self.ground.file(NAME), self.dtype, self.device)

    def condition(self, images: range) -> PromptCondition:
        return PromptCondition(tuple(self.ground.prompts[images.start : images.stop]))
