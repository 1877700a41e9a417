"""What LlamaGen and PAR, Tar's de-tokenizers, and Janus share as families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model_loaders.autoencoders.loader import expect_codes, expect_same_codes, load_vq
from ...model_loaders.catalogue.hub import Entry
from ...networks.autoencoder import VQModel
from ...networks.llama import TokenModel
from ...samplers.conditioning import AnyCondition
from ...samplers.editing import Edit
from ...samplers.tokens.canvas import tokens_to_regenerate
from ...samplers.tokens.mulosd import check_pair, grid_ratio
from ...samplers.tokens.mulosd.settings import MuLoSDSettings
from ...samplers.tokens.settings import published
from ...samplers.tokens.token_noise import TokenNoise
from ..memory.tokens import stages
from . import Family, network_of


class TokenFamily(Family):
    """Models that draw one discrete token after another, or several at once."""

    kind = "tokens"
    decoder = "vq"
    codes = True
    socket = "FASTAR_TOKEN_MODEL"
    model_help = "The model to sample: a LlamaGen, a Janus or a de-tokenizer of Tar, each from its own loader."
    condition_help = (
        "What to generate: one label or prompt per image. Connect Class Label or, for LlamaGen's text-to-image "
        "models, LlamaGen Prompt. For Janus, connect the node Prompt (FastAR) or the node Image and Prompt; for Tar, "
        "connect the node Tar Prompt or the node Image to Codes."
    )
    mask_help = (
        "The area to regenerate; all other tokens stay unchanged. New tokens match the unchanged tokens above them "
        "and to their left, but possibly not the unchanged tokens below them or to their right."
    )
    image_help = (
        "The tokens outside the mask stay unchanged, but small details there may differ from your image, because the "
        "VQ tokenizer encodes and decodes the whole image."
    )
    load_decoder = staticmethod(load_vq)

    def expect_decoder(self, decoder: VQModel, model: TokenModel) -> None:
        expect_codes(decoder, model)

    def published(self, model: TokenModel) -> dict[str, Any]:
        return published(model)

    def outlined(self, entry: Entry) -> TokenModel:
        return TokenModel(network_of(entry), entry.id, entry.grid)

    def noise(self, seed: int, images: Sequence[int]) -> TokenNoise:
        return TokenNoise(seed, images)

    def classes(self, model: TokenModel) -> int:
        return model.net.config.condition_size

    def grid(self, model: TokenModel, settings: Any = None) -> tuple[int, int]:
        return model.grid, model.grid

    def expect_draft(
        self, model: TokenModel, draft: TokenModel, tokenizer: VQModel, of_draft: VQModel, title: str
    ) -> None:
        """Check a draft model of a smaller image."""
        expect_same_codes(tokenizer, of_draft, model.name)
        check_pair(model, draft, codes=tokenizer.net.config.codes, sampler=title)
        grid_ratio(model, draft)

    def memory(
        self,
        model: TokenModel,
        condition: AnyCondition,
        settings: Any,
        draft: TokenModel | None = None,
        **more: Any,
    ) -> dict[str, int]:
        return stages(model, condition, settings, draft)

    def own_values(self, model: TokenModel, settings: Any) -> dict[str, Any]:
        neighbours = MuLoSDSettings().neighbours_among(model.net.config.vocab)
        return {**published(model), "cfg_interval": model.tokens, "neighbours": neighbours}

    def expect_edit(self, model: TokenModel, edit: Edit, settings: Any, images: int) -> None:
        tokens_to_regenerate(edit, model.grid, images, edit.start.device)
