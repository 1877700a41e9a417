"""Samplers of discrete tokens. Each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.gpt import TokenModel
from ..samplers import presets
from ..samplers.conditioning import Condition
from ..samplers.draws import PairedDraws
from ..samplers.llamagen import llamagen
from ..samplers.par import par
from ..samplers.settings import make
from ..samplers.token_conditions import AnyCondition, CodeCondition, TextCondition
from ..samplers.token_settings import LlamaGenSettings, PARSettings, TokenSettings, ZipARSettings
from ..samplers.tokens import TokenSampled, TokenStep
from ..samplers.zipar import zipar
from . import host
from .schema import CONDITION, REPORT, TOKEN_MODEL, checked_seed, expect, expect_model, schema, seed, widgets

LOADER = "Load LlamaGen / PAR"
OWN_LABELS = "picture-book"


def _inputs(settings: type[TokenSettings], model: str, preset: bool = False) -> list[io.Input]:
    sockets = [
        TOKEN_MODEL.Input("model", tooltip=model),
        CONDITION.Input("condition", tooltip="What to draw, one entry an image: from Class Label, or for text-to-image models from "
                        "Text Prompt (LlamaGen)."),
    ]  # fmt: skip
    chosen = io.Combo.Input(
        "preset", options=list(presets.NAMES), default=presets.AS_SET, advanced=True,
        tooltip="as set: the numbers above. exact, balanced and fast put other windows in their place: a whole row, then "
        "narrower ones; the report says which. exact is plain LlamaGen.",
    )  # fmt: skip
    return [*sockets, seed(), *widgets(settings), *([chosen] if preset else [])]


def _outputs() -> list[io.Output]:
    return [
        io.Latent.Output("latent", display_name="latent", tooltip="Decode it with VAE Decode and the vae of the same loader."),
        REPORT.Output("report", display_name="report", tooltip="What the sampler did; for Compare, Token Map and Report."),
    ]


def _together(model: TokenModel, settings: TokenSettings) -> int:
    """Most tokens of an image that one pass decides."""
    if isinstance(settings, PARSettings):
        return model.regions if model.regions > 1 else settings.group
    return math.ceil(model.grid / settings.window) if isinstance(settings, ZipARSettings) else 1


def _work_bytes(model: TokenModel, images: int, settings: TokenSettings, prefix: int) -> float:
    """Upper estimate of working memory: the cache, the prefix's rows, and logits on their way to a token."""
    c, size = model.net.config, next(model.net.parameters()).element_size()
    halves = 2 if settings.cfg > 1 else 1
    rows = halves * images * max(prefix, 2 * _together(model, settings))
    # Logits of both halves, mixed, cut, sorted (values and indices), and the draws, in fp32.
    logits = 4.0 * c.vocab * images * _together(model, settings) * (halves + 8)
    return model.cache_bytes(images, halves > 1) + rows * (8 * c.dim + 3 * c.hidden) * size + logits


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
    loaded = expect_model(model, host.Loaded, TokenModel, "model", LOADER)
    text = loaded.model.net.config.condition == "text"
    what = _condition(inputs.pop("condition"), text)
    number = checked_seed(inputs.pop("seed"))
    preset = inputs.pop("preset", presets.AS_SET)
    settings = presets.apply(make(kind, inputs), preset, loaded.model.label_set == OWN_LABELS)
    if loaded.vae is None:
        raise UserError(f"model: it came without its decoder; connect the output of {LOADER}.")
    grid = loaded.model.grid
    work = _work_bytes(loaded.model, len(what), settings, _rows(what))
    host.to_device(loaded, work, (len(what), loaded.vae.latent_channels, grid, grid))
    draws = PairedDraws(number, range(len(what)))
    sampler = method(loaded.model, what, settings, draws, number)
    done: TokenSampled = host.drive(sampler, loaded.vae, partial(_canvas, loaded.vae))
    return io.NodeOutput({"samples": host.to_output(_vectors(loaded.vae, done.codes))}, done.report)


def _condition(value: Any, text: bool) -> AnyCondition:
    """What is on the socket, if a sampler can draw from it at all; whether it suits the model the sampler says."""
    if isinstance(value, AnyCondition):
        return value
    return expect(value, TextCondition if text else Condition, "condition", "Text Prompt (LlamaGen)" if text else "Class Label")


def _rows(what: AnyCondition) -> int:
    """Most rows that an image of the condition has."""
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
            "compared with.",
            search_aliases=["llamagen", "autoregressive sampler", "token sampler", "raster", "baseline sampler"],
            inputs=_inputs(LlamaGenSettings, f"The LlamaGen to sample, from {LOADER}."),
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
            inputs=_inputs(PARSettings, f"The PAR to sample, from {LOADER}; a plain LlamaGen for the ablations of grouping."),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(par, PARSettings, model, inputs)


class ZipARSampler(io.ComfyNode):
    """ZipAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARZipAR",
            display_name="ZipAR Sampler",
            category="FastAR/sample",
            description="Starts a row as soon as the row above is a window of tokens ahead, so that several rows grow in one pass: "
            "neighbours matter, the far end of the row above hardly does (ICML 2025). Works with any LlamaGen, untrained.",
            search_aliases=["zipar", "parallel decoding", "spatial locality", "accelerated llamagen"],
            inputs=_inputs(ZipARSettings, f"The LlamaGen to sample, from {LOADER}.", preset=True),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(zipar, ZipARSettings, model, inputs)


NODES: list[type[io.ComfyNode]] = [LlamaGenSampler, PARSampler, ZipARSampler]
