"""LlamaGen and PAR, Tar's de-tokenizers, and Janus as families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...networks.llama import TokenModel
from ...samplers.conditioning import AnyCondition
from ...samplers.editing import Edit
from ...samplers.tokens.canvas import tokens_again
from ...samplers.tokens.defaults import published, resolve
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import MuLoSDSettings, neighbours_of
from ..memory.tokens import stages
from . import Family


class TokenFamily(Family):
    """Models that draw one discrete token after another, or several at once."""

    kind = "tokens"
    decoder = "vq"
    codes = True
    small_draft = "a draft model of a smaller image"

    def noise(self, seed: int, images: Sequence[int]) -> PairedDraws:
        return PairedDraws(seed, images)

    def grid(self, model: TokenModel, settings: Any = None) -> tuple[int, int]:
        return model.grid, model.grid

    def memory(
        self,
        model: TokenModel,
        condition: AnyCondition,
        settings: Any,
        draft: TokenModel | None = None,
        **more: Any,
    ) -> dict[str, int]:
        return stages(model, condition, settings, draft)

    def complete(self, model: TokenModel, settings: Any) -> Any:
        return resolve(settings, model)

    def own_values(self, model: TokenModel, settings: Any) -> dict[str, Any]:
        neighbours = neighbours_of(MuLoSDSettings(), model.net.config.vocab)
        return {**published(model), "cfg_interval": model.tokens, "neighbours": neighbours}

    def expect_edit(self, model: TokenModel, edit: Edit, settings: Any, images: int) -> None:
        tokens_again(edit, model.grid, images, edit.start.device)
