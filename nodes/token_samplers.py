"""Samplers of discrete tokens: each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..assembly import expect_same_codes, is_demo
from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.networks.autoencoder import VQModel
from ..model_loaders.networks.llama import TokenModel
from ..samplers.batches import in_parts
from ..samplers.conditioning import AnyCondition, CodeCondition, Condition, FeatureCondition, TextCondition
from ..samplers.registry import LLAMAGEN, SAMPLERS
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.loop import TokenSampled, TokenStep, resolve
from ..samplers.tokens.settings import neighbours_of
from ..samplers.tokens.upsampling import up_sampling
from . import host
from .conditioning import READING, LabelText, as_labels
from .fitting import VQ, is_upscale_model, mark
from .loaders import TA_TOK, UP_SAMPLER
from .schema import (
    TOKEN_CONDITION,
    TOKEN_MODEL,
    automatic_names,
    checked_seed,
    checked_switch,
    describe,
    enabled,
    expect,
    expect_model,
    sampled,
    schema,
    seed,
    settings_of,
    shared,
    widgets,
)
from .schema import preset as preset_widget
from .status import hidden, reported

LOADER = "Load LlamaGen / PAR"
DETOKENIZER = "Load Tar De-tokenizer"
# Kind of condition to the node that makes it.
SOURCES = {"class": "Class Label", "text": "Text Prompt (LlamaGen)", "features": "Tar Prompt", "codes": "Tar Prompt"}
# Kinds of condition of Tar's de-tokenizers.
_OF_TAR = ("features", "codes")
# Upper estimate of a TA-Tok's activations for the codes of one picture; pictures are read one at a time.
_READER_BYTES = 256 << 20
# Pixels that pass through the decoder at once when a draft is enlarged.
_PIXELS = 1 << 21


def _schema(
    sampler: str,
    models: dict[str, str],
    presets: str = "",
    optional: tuple[io.Input, ...] = (),
    vae: str = "the same loader",
    **about: Any,
) -> io.Schema:
    """Schema of a sampler node with the widgets of its settings.

    Args:
        sampler: name in the registry.
        models: model sockets by name, with their tooltips.
        presets: tooltip of the preset widget; "" without one.
        optional: inputs behind the widgets.
        vae: loader whose VAE decodes the latent.
        about: other arguments of the schema.
    """
    condition = TOKEN_CONDITION.Input(
        "condition",
        tooltip="What to draw, one entry an image: from Class Label; for text-to-image models from "
        "Text Prompt (LlamaGen); for Tar's de-tokenizers from Tar Prompt or Image to Codes.",
    )
    settings = SAMPLERS[sampler].settings
    switches = [preset_widget(presets), enabled("plain decoding, one token after another,")] if presets else []
    return schema(
        category="FastAR/sample",
        sockets=[*(TOKEN_MODEL.Input(name, tooltip=tooltip) for name, tooltip in models.items()), condition],
        widgets=[seed(), *widgets(settings, automatic_names(settings)), *switches],
        optional=optional,
        outputs=sampled(vae),
        hidden=hidden(),
        **about,
    )


def _work_bytes(model: TokenModel, images: int, settings: Any, prefix: int, together: int = 1, block: int = 0) -> float:
    """Upper estimate of working memory: KV cache, rows of the largest pass, and logits.

    Args:
        prefix: condition rows of an image.
        together: tokens of an image that one pass decides, at most.
        block: further rows of the largest pass beyond the prefix.
    """
    c, size = model.net.config, next(model.net.parameters()).element_size()
    halves = 2 if settings.cfg > 1 else 1
    rows = halves * images * max(prefix + block, 2 * together)
    # Logits of both halves, mixed, cut, sorted (values and indices), and the draws, in fp32.
    logits = 4.0 * c.vocab * images * together * (halves + 8)
    return model.cache_bytes(images, halves > 1, prefix) + rows * (8 * c.dim + 3 * c.hidden) * size + logits


def _vectors(vae: host.FastARVAE, codes: Tensor) -> Tensor:
    """Code vectors, as a LATENT, on the device of the codebook."""
    return vae.first_stage_model.vectors(codes.to(vae.first_stage_model.quantize.embedding.weight.device))


def _canvas(vae: host.FastARVAE, step: TokenStep) -> Tensor:
    return _vectors(vae, step.codes)


def one_together(model: TokenModel, settings: Any) -> int:
    """Tokens of an image that one pass decides: one."""
    return 1


def par_together(model: TokenModel, settings: Any) -> int:
    """Tokens of an image that one pass of PAR decides, at most."""
    return model.regions if model.regions > 1 else settings.group


def _settings(sampler: str, inputs: dict[str, Any], loaded: host.Loaded) -> Any:
    """Settings from a node's widgets."""
    return settings_of(SAMPLERS[sampler].settings, inputs, loaded.recommended, is_demo(loaded.model))


def _baseline(sampler: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The values of an accelerator's widgets that its baseline has too."""
    return shared(SAMPLERS[sampler].settings, SAMPLERS[LLAMAGEN].settings, inputs)


def _sample(
    sampler: str, model: Any, inputs: dict[str, Any], together: Callable[[TokenModel, Any], int] = one_together
) -> io.NodeOutput:
    """Check the inputs that all token samplers share, make room, run.

    Args:
        sampler: name in the registry.
        model: value of the model socket.
        inputs: the node's other inputs by name. Without ``enabled``, the baseline runs with the settings that it shares.
        together: tokens of an image that one pass decides, at most.
    """
    loaded = expect_tokens(model, "model")
    condition, number = inputs.pop("condition"), inputs.pop("seed")
    if not checked_switch(inputs.pop("enabled", True), "enabled"):
        sampler, inputs, together = LLAMAGEN, _baseline(sampler, inputs), one_together
    return run_sampler(sampler, loaded, _settings(sampler, inputs, loaded), condition, number, together)


def run_sampler(
    sampler: str,
    loaded: host.Loaded,
    settings: Any,
    condition: Any,
    seed: Any,
    together: Callable[[TokenModel, Any], int] = one_together,
) -> io.NodeOutput:
    """Run a sampler whose settings are known; arguments as :func:`_sample`."""
    condition, number = _condition(condition, loaded), checked_seed(seed)
    settings = resolve(settings, loaded.model)
    condition = _read(condition, loaded)
    cells = min(loaded.model.tokens, together(loaded.model, settings) * max(1, settings.parallel))
    work = _work_bytes(loaded.model, len(condition), settings, _rows(condition), cells)
    _to_device(loaded, work, len(condition))
    run = SAMPLERS[sampler].run
    return _run(
        lambda part: run(loaded.model, condition.of(part), settings, PairedDraws(number, part), number),
        len(condition),
        loaded,
    )


def _to_device(loaded: host.Loaded, work: float, images: int, others: tuple[Any, ...] = ()) -> None:
    grid = loaded.model.grid
    host.to_device(loaded, work, (images, _vae(loaded).latent_channels, grid, grid), others)


def _run(start: Callable[[range], Any], images: int, loaded: host.Loaded) -> io.NodeOutput:
    vae = _vae(loaded)
    done: TokenSampled = host.drive(in_parts(start, images), vae, partial(_canvas, vae))
    with enough_memory(READING):
        return io.NodeOutput({"samples": mark(host.to_output(_vectors(vae, done.codes)), VQ)}, done.report)


def _vae(loaded: host.Loaded) -> host.FastARVAE:
    assert loaded.vae is not None  # checked by expect_tokens
    return loaded.vae


def expect_tokens(value: Any, field: str) -> host.Loaded:
    """Check a model socket: a token model with its decoder.

    Raises:
        UserError: anything else.
    """
    loaded = expect_model(value, host.Loaded, TokenModel, field, f"{LOADER} or {DETOKENIZER}")
    if loaded.vae is None:
        raise UserError(f"{field}: it came without its decoder; connect the output of {LOADER} or {DETOKENIZER}.")
    return loaded


def _condition(value: Any, loaded: host.Loaded) -> AnyCondition:
    """Check that a socket holds a condition; the sampler checks that it fits the model."""
    if isinstance(value, LabelText):
        return as_labels(value, loaded.model.label_set)
    if isinstance(value, AnyCondition):
        return value
    kind = loaded.model.net.config.condition
    return expect(
        value, {"class": Condition, "text": TextCondition}.get(kind, CodeCondition), "condition", SOURCES[kind]
    )


def _read(condition: AnyCondition, loaded: host.Loaded) -> AnyCondition:
    """Turn semantic codes into features with the model's TA-Tok, which is on the device only for that."""
    if not isinstance(condition, CodeCondition) or TA_TOK not in loaded.parts:
        return condition
    reader = loaded.parts[TA_TOK]
    host.load_to_device(reader, _READER_BYTES)
    with enough_memory(READING):
        made = features_of(condition, reader.model)
    return FeatureCondition(tuple(rows.to(host.device()) for rows in made.features), made.names)


def _rows(condition: AnyCondition) -> int:
    """Condition rows of an image in front of the picture's tokens, at most."""
    if isinstance(condition, Condition):
        return 1
    entries = condition.codes if isinstance(condition, CodeCondition) else condition.features
    return max(map(len, entries), default=1)


class LlamaGenSampler(io.ComfyNode):
    """Plain LlamaGen."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "llamagen",
            node_id="FastARLlamaGenSampler",
            display_name="LlamaGen Sampler",
            description="Plain LlamaGen, as published: one token after another, row by row. The baseline that PAR and ZipAR are "
            "compared with. Also draws from the codes of Tar.",
            search_aliases=["llamagen", "tar", "autoregressive sampler", "token sampler", "raster", "baseline sampler"],
            models={"model": f"The model to sample: a LlamaGen from {LOADER}, or {DETOKENIZER}'s."},
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("llamagen", model, inputs)


class PARSampler(io.ComfyNode):
    """PAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "par",
            node_id="FastARPAR",
            display_name="PAR Sampler",
            description="Cuts the picture into regions and decides the same cell of all of them in one pass: distant tokens depend "
            "little on each other (CVPR 2025). Needs a PAR; on a plain LlamaGen it shows the paper's ablations.",
            search_aliases=["par", "parallelized autoregressive", "parallel decoding", "accelerated llamagen"],
            models={"model": f"The PAR to sample, from {LOADER}; a plain LlamaGen for the ablations of grouping."},
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        loaded = expect_tokens(model, "model")
        if loaded.model.net.config.condition in _OF_TAR:
            raise UserError(
                f"model: {loaded.model.name} is a Tar de-tokenizer, which decides its tokens row by row; connect a PAR from {LOADER}, or "
                "use LlamaGen Sampler or ZipAR Sampler."
            )
        return _sample("par", model, inputs, par_together)


_WINDOWS = "exact is a window of a whole row: plain decoding."


def rows_together(model: TokenModel, settings: Any) -> int:
    """Rows that ZipAR decodes at the same time, at most."""
    return math.ceil(model.grid / settings.window)


class ZipARSampler(io.ComfyNode):
    """ZipAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "zipar",
            node_id="FastARZipARSampler",
            display_name="ZipAR Sampler",
            description="Starts a row as soon as the row above is a window of tokens ahead, so that several rows grow in one pass: "
            "neighbours matter, the far end of the row above hardly does (ICML 2025). Works with any LlamaGen and with Tar, untrained.",
            search_aliases=[
                "zipar",
                "parallel decoding",
                "spatial locality",
                "accelerated llamagen",
                "accelerated tar",
            ],
            models={"model": f"The model to sample: a LlamaGen from {LOADER}, or {DETOKENIZER}'s."},
            presets=_WINDOWS,
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("zipar", model, inputs, rows_together)


# ------------------------------------------------------------------------------------------------ MuLo-SD

_SHARES = (
    "balanced and fast keep 70 and 90 of 100 drafted tokens of full-size models, and on the demo what tau 0.1 keeps, with wider and "
    "narrower windows. exact draws everything again: the target's own picture, without a draft."
)


def _vq(loaded: host.Loaded) -> VQModel:
    vae = _vae(loaded)
    return VQModel(vae.first_stage_model, vae.name)


def _decoder_bytes(target: host.Loaded, images: int) -> float:
    """Working memory of enlarging: a part of the batch through the decoder and the encoder."""
    vae, pixels = _vae(target), target.model.grid * _vae(target).downscale_ratio
    part = max(1, min(images, _PIXELS // pixels**2))
    return part * vae.memory_used_encode((1, 3, pixels, pixels), vae.vae_dtype)


class MuLoSDSampler(io.ComfyNode):
    """MuLo-SD."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = {
            "target": f"The model whose picture is wanted: Tar's de-tokenizer of 512 or 1024 pixels from {DETOKENIZER}, or a LlamaGen.",
            "draft": "A model of the same kind and decoder that draws the same picture smaller, by half, a third or a quarter of the side: "
            "Tar's de-tokenizer of 256 pixels, usually.",
        }
        upscale_model = io.UpscaleModel.Input(
            "upscale_model",
            optional=True,
            tooltip="Enlarges the draft, from Load Upscale Model; without one it is enlarged bicubically. Sharper drafts lose "
            "fewer tokens. One of the same factor as the two models fits best; any other is brought to the size.",
        )
        return _schema(
            "mulosd",
            node_id="FastARMuLoSDSampler",
            display_name="MuLo-SD Sampler",
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
            models=models,
            presets=_SHARES,
            optional=(upscale_model,),
            vae="the target's loader",
        )

    @classmethod
    @reported
    def execute(
        cls, target: Any, draft: Any, condition: Any, seed: Any, upscale_model: Any = None, **inputs: Any
    ) -> io.NodeOutput:
        large = expect_tokens(target, "target")
        if not checked_switch(inputs.pop("enabled", True), "enabled"):
            settings = _settings(LLAMAGEN, _baseline("mulosd", inputs), large)
            return run_sampler(LLAMAGEN, large, settings, condition, seed)
        return run_mulosd(large, draft, _settings("mulosd", inputs, large), condition, seed, upscale_model)


def run_mulosd(
    large: host.Loaded, draft: Any, settings: Any, condition: Any, seed: Any, upscale_model: Any = None
) -> io.NodeOutput:
    """Run MuLo-SD with known settings; other arguments are values of the node's inputs."""
    small = expect_tokens(draft, "draft")
    condition, number = _condition(condition, large), checked_seed(seed)
    settings = resolve(settings, large.model)
    expect_same_codes(_vq(large), _vq(small), large.model.name)
    if upscale_model is not None and not is_upscale_model(upscale_model):
        raise UserError(
            f"upscale_model: it got {describe(upscale_model)}; connect the output of Load Upscale Model, of one for colour pictures."
        )
    upscaler = None if upscale_model is None else host.Upscaler(upscale_model)
    learned = large.parts.get(UP_SAMPLER)
    up = up_sampling(
        settings.up_sampler,
        _vq(large),
        upscaler,
        upscaler.name if upscaler else "",
        learned.model if learned else None,
    )
    condition = _read(condition, large)
    images = len(condition)
    others = tuple(part for part in (small, large.vae, upscaler, learned) if part is not None)
    _to_device(large, _mulosd_bytes(large, small, upscaler, settings, condition), images, others)

    def start(part: range) -> Any:
        draws, more = PairedDraws(number, part), {"draft": small.model, "up_sampler": up}
        return SAMPLERS["mulosd"].run(large.model, condition.of(part), settings, draws, number, **more)

    return _run(start, images, large)


def _mulosd_bytes(
    large: host.Loaded, small: host.Loaded, upscaler: host.Upscaler | None, settings: Any, condition: AnyCondition
) -> float:
    """Upper estimate: both caches, the pass over the whole draft, the widest wave, the neighbour table, and enlarging."""
    images, model, rows = len(condition), large.model, _rows(condition)
    vocab = model.net.config.vocab
    # Islands are separated, so a wave has at most one cell of every second row and column.
    wave = math.ceil(model.grid / 2) ** 2
    verifying = _work_bytes(model, images, settings, rows, min(wave, 256), model.tokens)
    cells = min(small.model.tokens, small.model.grid * max(1, settings.draft_parallel))
    drafting = _work_bytes(small.model, images, settings, rows, cells)
    table = 4.0 * vocab * (neighbours_of(settings, vocab) + 4096)
    side = small.model.grid * _vae(large).downscale_ratio
    enlarging = max(_decoder_bytes(large, images), upscaler.memory(side, side) if upscaler else 0)
    return verifying + drafting + table + enlarging


NODES: list[type[io.ComfyNode]] = [LlamaGenSampler, PARSampler, ZipARSampler, MuLoSDSampler]
