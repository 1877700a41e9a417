"""What MAR, Harmon and UniPic share as families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...networks.mar import MARModel
from ...samplers.editing import Edit
from ...samplers.mar.cspd import check_pair
from ...samplers.mar.lazy.schedule import measuring_block
from ...samplers.mar.lazy.settings import CacheSettings
from ...samplers.mar.prepare import latents_and_mask
from ...samplers.mar.settings import SAFE_FIRST_TIMESTEP, MARBase
from ..memory import FEATURES, PROMPTS, weights_by_part
from ..memory.mar import estimate
from . import Family


class MARFamily(Family):
    """Models whose transformer knows the tokens decided so far, in any order, and whose tokens a small network draws by
    diffusion.
    """

    kind = "masked"
    unit = "AR steps"
    socket = "FASTAR_MAR"
    condition_help = (
        "What to generate: one label or prompt per image. For a MAR, connect Class Label; for Harmon and UniPic, "
        "connect Prompt (FastAR)."
    )
    mask_help = (
        "The area to regenerate; everything else in the latent stays unchanged. A token is regenerated if the mask "
        "covers any part of it, even if the mask is faint there."
    )

    def latent_channels(self, model: MARModel) -> int:
        return model.net.config.channels // model.patch**2

    def with_note(self, model: MARModel, note: str) -> MARModel:
        return replace(model, assumed=f"{model.assumed}; {note}" if model.assumed else note)

    def grid(self, model: MARModel, settings: Any = None) -> tuple[int, int]:
        return model.net.config.grid, model.net.config.grid

    def latents(self, model: MARModel, settings: Any = None) -> tuple[int, int]:
        side = model.net.config.grid * model.patch
        return side, side

    def expect_draft(self, model: MARModel, draft: MARModel, tokenizer: Any, of_draft: Any, title: str) -> None:
        check_pair(model, draft)

    def step_numbers(self, model: MARModel, settings: Any) -> int:
        return model.net.config.tokens * model.net.config.channels

    def memory(
        self,
        model: MARModel,
        condition: Any,
        settings: Any,
        cache: CacheSettings | None = None,
        draft: MARModel | None = None,
        **more: Any,
    ) -> dict[str, int]:
        caches = settings if isinstance(settings, CacheSettings) else cache
        out = estimate(model, condition, settings, caches)
        if draft is None:
            return out

        # A draft works when the target does not, but both keep what they keep.
        out |= weights_by_part(draft, of="draft ")
        of_draft = estimate(draft, condition, settings, caches)
        for stage in (PROMPTS, FEATURES):
            if stage in of_draft:
                out[f"draft {stage}"] = of_draft[stage]
        return out

    def own_values(self, model: MARModel, settings: Any) -> dict[str, Any]:
        # block is no setting any more, but saved graphs name it, see CacheSettings.
        own = {"block": measuring_block(model.net.config.decoder_depth)}
        if isinstance(settings, MARBase):
            first = model.first_timestep(settings.diffusion_steps)
            own["t_max"] = min(first, SAFE_FIRST_TIMESTEP) if settings.limits_first_timestep else first
        return own

    def short(self, settings: Any) -> Any:
        """One AR step, or as few as the sampler has, with two diffusion steps."""
        return type(settings)(steps=settings.fewest_steps, diffusion_steps=2)

    def width(self, model: MARModel) -> int:
        return model.net.config.dim

    def expect_edit(self, model: MARModel, edit: Edit, settings: Any, images: int) -> None:
        latents_and_mask(model, edit, images, edit.start.device)
