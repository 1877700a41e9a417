"""Samplers of discrete tokens. Each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.gpt import TokenModel
from ..model_loaders.networks.vq import VQModel
from ..samplers import presets
from ..samplers.conditioning import AnyCondition, CodeCondition, Condition, FeatureCondition, TextCondition
from ..samplers.settings import make
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.llamagen import llamagen
from ..samplers.tokens.loop import TokenSampled, TokenStep
from ..samplers.tokens.mulosd import mulosd
from ..samplers.tokens.par import par
from ..samplers.tokens.settings import (
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TokenSettings,
    ZipARSettings,
    neighbours_of,
)
from ..samplers.tokens.upsampling import up_sampling
from ..samplers.tokens.zipar import zipar
from . import host
from .loaders import TA_TOK, UP_SAMPLER
from .schema import CONDITION, REPORT, TOKEN_MODEL, checked_seed, expect, expect_model, schema, seed, told, widgets

LOADER = "Load LlamaGen / PAR"
DETOKENIZER = "Load Tar De-tokenizer"
OWN_LABELS = "picture-book"
# What a condition of each kind comes from.
SOURCES = {"class": "Class Label", "text": "Text Prompt (LlamaGen)", "features": "Tar Prompt", "codes": "Tar Prompt"}
# A TA-Tok's activations for the codes of one picture, generously; pictures are read one by one.
_READING = 256 << 20
# Code vectors of two loaders of one file are equal, of two files almost.
_SAME_CODE = 1e-2


def _inputs(settings: type[TokenSettings], models: dict[str, str], preset: str = "") -> list[io.Input]:
    """What all token samplers have.

    Args:
        settings: the sampler's.
        models: model sockets by name, each with its tooltip.
        preset: what presets put in the place of the numbers above; "" if there are none.
    """
    sockets = [
        *(TOKEN_MODEL.Input(name, tooltip=tooltip) for name, tooltip in models.items()),
        CONDITION.Input(
            "condition",
            tooltip="What to draw, one entry an image: from Class Label; for text-to-image models from "
            "Text Prompt (LlamaGen); for Tar's de-tokenizers from Tar Prompt or Image to Codes.",
        ),
    ]
    chosen = io.Combo.Input(
        "preset",
        options=list(presets.NAMES),
        default=presets.AS_SET,
        advanced=True,
        tooltip=f"as set: the numbers above. {preset}",
    )
    return [*sockets, seed(), *widgets(settings), *([chosen] if preset else [])]


def _outputs(vae: str = "the same loader") -> list[io.Output]:
    return [
        io.Latent.Output("latent", display_name="latent", tooltip=f"Decode it with VAE Decode and the vae of {vae}."),
        REPORT.Output(
            "report", display_name="report", tooltip="What the sampler did; for Compare, Token Map and Report."
        ),
    ]


def _together(model: TokenModel, settings: TokenSettings) -> int:
    """Most tokens of an image that one pass decides."""
    if isinstance(settings, PARSettings):
        return model.regions if model.regions > 1 else settings.group
    return math.ceil(model.grid / settings.window) if isinstance(settings, ZipARSettings) else 1


def _work_bytes(
    model: TokenModel, images: int, settings: TokenSettings, prefix: int, together: int | None = None, block: int = 0
) -> float:
    """Upper estimate of working memory: the cache, the rows of the largest pass (``block`` more than the prefix), and logits on their
    way to a token."""
    c, size = model.net.config, next(model.net.parameters()).element_size()
    halves, together = 2 if settings.cfg > 1 else 1, together or _together(model, settings)
    rows = halves * images * max(prefix + block, 2 * together)
    # Logits of both halves, mixed, cut, sorted (values and indices), and the draws, in fp32.
    logits = 4.0 * c.vocab * images * together * (halves + 8)
    return model.cache_bytes(images, halves > 1, prefix) + rows * (8 * c.dim + 3 * c.hidden) * size + logits


def _vectors(vae: host.FastARVAE, codes: Tensor) -> Tensor:
    """The LATENT of codes, computed where the codebook lies."""
    return vae.first_stage_model.vectors(codes.to(vae.first_stage_model.quantize.embedding.weight.device))


def _canvas(vae: host.FastARVAE, step: TokenStep) -> Tensor:
    return _vectors(vae, step.codes)


def _sample(method: Any, kind: type[TokenSettings], model: Any, inputs: dict[str, Any]) -> io.NodeOutput:
    """Check what all token samplers share, make room, run.

    Args:
        method: the sampler; called with model, condition, settings, noise, seed.
        kind: its settings.
        model: what arrived on the socket.
        inputs: the node's remaining inputs by name.
    """
    loaded = _model(model, "model")
    what = _condition(inputs.pop("condition"), loaded)
    number = checked_seed(inputs.pop("seed"))
    preset = inputs.pop("preset", presets.AS_SET)
    settings = presets.apply(make(kind, inputs), preset, loaded.model.label_set == OWN_LABELS)
    what = _read(what, loaded)
    grid = loaded.model.grid
    work = _work_bytes(loaded.model, len(what), settings, _rows(what))
    host.to_device(loaded, work, (len(what), loaded.vae.latent_channels, grid, grid))
    draws = PairedDraws(number, range(len(what)))
    sampler = method(loaded.model, what, settings, draws, number)
    done: TokenSampled = host.drive(sampler, loaded.vae, partial(_canvas, loaded.vae))
    return io.NodeOutput({"samples": host.to_output(_vectors(loaded.vae, done.codes))}, done.report)


def _model(value: Any, field: str) -> host.Loaded:
    """A token model with its decoder.

    Raises:
        UserError: anything else.
    """
    loaded = expect_model(value, host.Loaded, TokenModel, field, f"{LOADER} or {DETOKENIZER}")
    if loaded.vae is None:
        raise UserError(f"{field}: it came without its decoder; connect the output of {LOADER} or {DETOKENIZER}.")
    return loaded


def _condition(value: Any, loaded: host.Loaded) -> AnyCondition:
    """What is on the socket, if a sampler can draw from it at all; whether it suits the model the sampler says."""
    if isinstance(value, AnyCondition):
        return value
    kind = loaded.model.net.config.condition
    return expect(
        value, {"class": Condition, "text": TextCondition}.get(kind, CodeCondition), "condition", SOURCES[kind]
    )


def _read(what: AnyCondition, loaded: host.Loaded) -> AnyCondition:
    """Semantic codes as features, by the model's TA-Tok, which is on the device only for that; anything else as it is."""
    if not isinstance(what, CodeCondition) or TA_TOK not in loaded.parts:
        return what
    reader = loaded.parts[TA_TOK]
    host.bring(reader, _READING)
    made = features_of(what, reader.model)
    return FeatureCondition(tuple(rows.to(host.device()) for rows in made.features), made.names)


def _rows(what: AnyCondition) -> int:
    """Most rows that an image of the condition stands for in front of the picture's tokens."""
    entries = () if isinstance(what, Condition) else what.codes if isinstance(what, CodeCondition) else what.features
    return max(map(len, entries), default=1)


class LlamaGenSampler(io.ComfyNode):
    """Plain LlamaGen."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLlamaGenSampler",
            display_name="LlamaGen Sampler",
            category="FastAR/sample",
            description="Plain LlamaGen, as published: one token after another, row by row. The baseline that PAR and ZipAR are "
            "compared with. Also draws from the codes of Tar.",
            search_aliases=["llamagen", "tar", "autoregressive sampler", "token sampler", "raster", "baseline sampler"],
            inputs=_inputs(
                LlamaGenSettings, {"model": f"The model to sample: a LlamaGen from {LOADER}, or {DETOKENIZER}'s."}
            ),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(llamagen, LlamaGenSettings, model, inputs)


class PARSampler(io.ComfyNode):
    """PAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARPAR",
            display_name="PAR Sampler",
            category="FastAR/sample",
            description="Cuts the picture into regions and decides the same cell of all of them in one pass: distant tokens depend "
            "little on each other (CVPR 2025). Needs a PAR; on a plain LlamaGen it shows the paper's ablations.",
            search_aliases=["par", "parallelized autoregressive", "parallel decoding", "accelerated llamagen"],
            inputs=_inputs(
                PARSettings,
                {"model": f"The PAR to sample, from {LOADER}; a plain LlamaGen for the ablations of grouping."},
            ),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(par, PARSettings, model, inputs)


_WINDOWS = (
    "exact, balanced and fast put other windows in their place, a whole row and then narrower ones; the "
    "report says which. exact is plain LlamaGen."
)


class ZipARSampler(io.ComfyNode):
    """ZipAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARZipAR",
            display_name="ZipAR Sampler",
            category="FastAR/sample",
            description="Starts a row as soon as the row above is a window of tokens ahead, so that several rows grow in one pass: "
            "neighbours matter, the far end of the row above hardly does (ICML 2025). Works with any LlamaGen and with Tar, untrained.",
            search_aliases=[
                "zipar",
                "parallel decoding",
                "spatial locality",
                "accelerated llamagen",
                "accelerated tar",
            ],
            inputs=_inputs(
                ZipARSettings,
                {"model": f"The model to sample: a LlamaGen from {LOADER}, or {DETOKENIZER}'s."},
                _WINDOWS,
            ),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(zipar, ZipARSettings, model, inputs)


# ------------------------------------------------------------------------------------------------ MuLo-SD

_SHARES = (
    "balanced and fast keep 70 and 90 of 100 drafted tokens of full-size models instead, and on the demo what tau 0.1 keeps, with wider "
    "and narrower windows; the report says which. exact draws everything again: the target's own picture, slower than without MuLo-SD."
)


def _same_tokenizer(target: host.Loaded, draft: host.Loaded) -> None:
    """Nothing if the decoders of both mean the same by a code.

    Raises:
        UserError: they are two.
    """
    assert target.vae is not None and draft.vae is not None
    books = [vae.first_stage_model.quantize.embedding.weight for vae in (target.vae, draft.vae)]
    if books[0].shape == books[1].shape:
        a, b = (torch.nn.functional.normalize(book.detach().cpu().float(), dim=-1) for book in books)
        if torch.allclose(a, b, rtol=0, atol=_SAME_CODE):
            return
    raise UserError(
        f"draft: its decoder is {draft.vae.name}, {target.model.name}'s is {target.vae.name}, whose codes mean something else; "
        "load both with the same decoder."
    )


def _decoder_bytes(target: host.Loaded, images: int) -> float:
    """What enlarging takes: a piece of the batch through the decoder and back."""
    assert target.vae is not None
    vae, pixels = target.vae, target.model.grid * target.vae.downscale_ratio
    # Pieces have about two million pixels.
    piece = max(1, min(images, (1 << 21) // pixels**2))
    return piece * vae.memory_used_encode((1, 3, pixels, pixels), vae.vae_dtype)


class MuLoSDSampler(io.ComfyNode):
    """MuLo-SD."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = {
            "target": f"The model whose picture is wanted: Tar's de-tokenizer of 512 or 1024 pixels from {DETOKENIZER}, or a LlamaGen.",
            "draft": "A model of the same kind and decoder that draws the same picture smaller, by half, a third or a quarter of the side: "
            "Tar's de-tokenizer of 256 pixels, usually.",
        }
        return schema(
            node_id="FastARMuLoSD",
            display_name="MuLo-SD Sampler",
            category="FastAR/sample",
            description="Drafts the picture small, enlarges it, checks all of it in one pass of the large model, and draws again only what "
            "is unlikely, with its surroundings, many places at once (CVPR 2026). Lossy: pictures differ from the large model's own.",
            search_aliases=[
                "mulo-sd",
                "mulosd",
                "multi-scale",
                "speculative decoding",
                "accelerated tar",
                "accelerated llamagen",
            ],
            inputs=[
                *_inputs(MuLoSDSettings, models, _SHARES),
                io.UpscaleModel.Input(
                    "upscale_model",
                    optional=True,
                    tooltip="Enlarges the draft, from Load Upscale Model; without one it is enlarged bicubically. Sharper drafts lose "
                    "fewer tokens. One of the same factor as the two models fits best; any other is brought to the size.",
                ),
            ],
            outputs=_outputs("the target's loader"),
        )

    @classmethod
    def execute(
        cls, target: Any, draft: Any, condition: Any, seed: Any, upscale_model: Any = None, **inputs: Any
    ) -> io.NodeOutput:
        large, small = _model(target, "target"), _model(draft, "draft")
        assert large.vae is not None
        what, number = _condition(condition, large), checked_seed(seed)
        preset = inputs.pop("preset", presets.AS_SET)
        settings = presets.apply(make(MuLoSDSettings, inputs), preset, large.model.label_set == OWN_LABELS)
        _same_tokenizer(large, small)
        if upscale_model is not None and not host.Upscaler.fits(upscale_model):
            raise UserError(
                f"upscale_model: it got {told(upscale_model)}; connect the output of Load Upscale Model, of one for colour pictures."
            )
        upscaler = None if upscale_model is None else host.Upscaler(upscale_model)
        learned = large.parts.get(UP_SAMPLER)
        vq = VQModel(large.vae.first_stage_model, large.vae.name)
        up = up_sampling(
            settings.up_sampler, vq, upscaler, upscaler.name if upscaler else "", learned.model if learned else None
        )
        what = _read(what, large)
        images, grid = len(what), large.model.grid
        others = [part for part in (small, large.vae, upscaler, learned) if part is not None]
        work = cls._work_bytes(large, small, upscaler, settings, what)
        host.to_device(large, work, (images, large.vae.latent_channels, grid, grid), others)
        sampler = mulosd(
            large.model, what, settings, PairedDraws(number, range(images)), number, draft=small.model, up_sampler=up
        )
        done: TokenSampled = host.drive(sampler, large.vae, partial(_canvas, large.vae))
        return io.NodeOutput({"samples": host.to_output(_vectors(large.vae, done.codes))}, done.report)

    @staticmethod
    def _work_bytes(
        large: host.Loaded,
        small: host.Loaded,
        upscaler: host.Upscaler | None,
        settings: MuLoSDSettings,
        what: AnyCondition,
    ) -> float:
        """Upper estimate: both caches, the pass over the whole draft, the widest wave, neighbours, and what enlarging takes."""
        assert large.vae is not None
        images, model, rows = len(what), large.model, _rows(what)
        c = model.net.config
        # Islands lie apart: a wave has at most a cell of every second row and column.
        wave = math.ceil(model.grid / 2) ** 2
        together = _work_bytes(model, images, settings, rows, min(wave, 256), model.tokens)
        drafting = _work_bytes(small.model, images, settings, rows, small.model.grid)
        table = 4.0 * c.vocab * (neighbours_of(settings, c.vocab) + 4096)
        side = small.model.grid * large.vae.downscale_ratio
        enlarging = max(_decoder_bytes(large, images), upscaler.memory(side, side) if upscaler else 0)
        return together + drafting + table + enlarging


NODES: list[type[io.ComfyNode]] = [LlamaGenSampler, PARSampler, ZipARSampler, MuLoSDSampler]
