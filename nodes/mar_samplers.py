"""Samplers on a MAR. Each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io

from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..samplers import presets
from ..samplers.conditioning import Condition
from ..samplers.mar.cspd import cspd
from ..samplers.mar.denoiser import Denoiser
from ..samplers.mar.editing import Edit
from ..samplers.mar.fasthybrid import fasthybrid
from ..samplers.mar.lazymar import LazyTransformer, lazymar
from ..samplers.mar.loop import Sampled
from ..samplers.mar.mar import mar
from ..samplers.mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
    PlainMARSettings,
)
from ..samplers.noise import PairedNoise
from ..samplers.settings import knob, make
from . import host
from .schema import CACHE, CONDITION, MAR, REPORT, checked_seed, expect, expect_model, schema, seed, widgets

NOISE_LIMIT = 4 << 30
OWN_LABELS = "picture-book"


def _model(name: str, tooltip: str) -> io.Input:
    return MAR.Input(name, tooltip=tooltip)


def _preset() -> io.Input:
    return io.Combo.Input(
        "preset",
        options=list(presets.NAMES),
        default=presets.AS_SET,
        advanced=True,
        tooltip="as set: the numbers above. exact, balanced and fast put measured numbers in their place, the demo's own for the demo "
        "and the papers' for full-size models; the report says which.",
    )


def _cache() -> io.Input:
    return CACHE.Input(
        "cache",
        optional=True,
        tooltip="From LazyMAR Cache: reuse most of the transformer's work from step to step. Unconnected: everything is computed.",
    )


def _edit() -> list[io.Input]:
    return [
        io.Latent.Input(
            "latent",
            optional=True,
            tooltip="A picture to change, from VAE Encode with the vae of the same loader. Needs a mask, here or on the latent itself.",
        ),
        io.Mask.Input(
            "mask",
            optional=True,
            tooltip="Where the picture is drawn anew; the rest comes back unchanged. A token is redrawn if any of it is painted over.",
        ),
    ]


def _outputs() -> list[io.Output]:
    return [
        io.Latent.Output(
            "latent", display_name="latent", tooltip="Decode it with VAE Decode and the vae of the same loader."
        ),
        REPORT.Output(
            "report", display_name="report", tooltip="What the sampler did; for Compare, Token Map and Report."
        ),
    ]


def _work_bytes(model: MARModel, images: int, settings: MARSettings, cached: bool) -> float:
    """Upper estimate of working memory: noise, transformer rows of both guidance branches, head modulations, caches."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    rows = 2 * images * 2 * (c.buffer + c.tokens)
    kept = images * 2 * (c.encoder_depth + c.decoder_depth + 2) * (c.buffer + c.tokens) * c.dim * size if cached else 0
    return _noise_bytes(model, images, settings) + rows * c.dim * 16 * size + 3 * Denoiser.budget * size + kept


def _noise_bytes(model: MARModel, images: int, settings: MARSettings) -> float:
    steps = settings.diffusion_steps + (settings.guided_steps if isinstance(settings, FastHybridSettings) else 0)
    return 4.0 * images * (steps + 2) * model.net.config.tokens * model.net.config.channels


def _edit_of(latent: Any, mask: Any) -> Edit | None:
    """The edit that the two optional sockets ask for."""
    if latent is None and mask is None:
        return None
    if latent is None:
        raise UserError(
            "latent: there is a mask but no picture to change; connect VAE Encode's output, or remove the mask."
        )
    if not isinstance(latent, dict) or not isinstance(latent.get("samples"), torch.Tensor):
        raise UserError("latent: it got no LATENT; connect the output of VAE Encode.")
    mask = latent.get("noise_mask") if mask is None else mask
    if mask is None:
        raise UserError("mask: without one nothing of the latent would be kept; paint a mask, or remove the latent.")
    area = expect(mask, torch.Tensor, "mask", "a node that gives a MASK")
    return Edit(latent["samples"], area[None] if area.ndim == 2 else area[:, 0] if area.ndim == 4 else area)


def _sample(
    method: Any, kind: type[MARSettings], loaded: host.Loaded, others: list[host.Loaded], inputs: dict[str, Any]
) -> io.NodeOutput:
    """Check what all MAR samplers share, make room, run.

    Args:
        method: the sampler; called with model, condition, settings, noise, seed and by name edit and transformer.
        kind: its settings.
        loaded: the model that is sampled from.
        others: more models that must be on the device.
        inputs: the node's remaining inputs by name.
    """
    what = expect(inputs.pop("condition"), Condition, "condition", "Class Label")
    number = checked_seed(inputs.pop("seed"))
    preset, cache = inputs.pop("preset", presets.AS_SET), inputs.pop("cache", None)
    edit = _edit_of(inputs.pop("latent", None), inputs.pop("mask", None))
    demo = loaded.model.label_set == OWN_LABELS
    settings = presets.apply(make(kind, inputs), preset, demo)
    if _noise_bytes(loaded.model, len(what), settings) > NOISE_LIMIT:
        raise UserError(
            f"condition: {len(what)} images with {settings.diffusion_steps} diffusion steps need more than "
            f"{NOISE_LIMIT >> 30} GB of noise; ask for fewer images at once, or lower diffusion_steps."
        )
    if cache is not None:
        method = partial(method, transformer=LazyTransformer(expect(cache, CacheSettings, "cache", "LazyMAR Cache")))
    c, patch = loaded.model.net.config, loaded.model.patch
    shape = (len(what), c.channels // patch**2, c.grid * patch, c.grid * patch)
    work = _work_bytes(loaded.model, len(what), settings, cache is not None or isinstance(settings, CacheSettings))
    host.to_device(loaded, work, shape, others)
    noise = PairedNoise(number, range(len(what)))
    done: Sampled = host.drive(method(loaded.model, what, settings, noise, number, edit=edit), loaded.vae)
    return io.NodeOutput({"samples": host.to_output(done.latents)}, done.report)


def _inputs(
    settings: type[MARSettings], models: list[io.Input], sockets: list[io.Input], preset: bool
) -> list[io.Input]:
    condition = CONDITION.Input("condition", tooltip="What to draw, one entry an image, from Class Label.")
    return [*models, condition, seed(), *widgets(settings), *([_preset()] if preset else []), *sockets]


_ONE = "The MAR to sample, from Load MAR."


class MARSampler(io.ComfyNode):
    """Plain MAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARMARSampler",
            display_name="MAR Sampler",
            category="FastAR/sample",
            description="Plain MAR, as published: at every AR step the transformer says what the next tokens depend on and "
            "a full diffusion makes each. The baseline that the accelerators are compared with.",
            search_aliases=[
                "masked autoregressive",
                "mar",
                "autoregressive sampler",
                "baseline sampler",
                "disa",
                "inpaint",
            ],
            inputs=_inputs(PlainMARSettings, [_model("model", _ONE)], [_cache(), *_edit()], preset=False),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(
            mar, PlainMARSettings, expect_model(model, host.Loaded, MARModel, "model", "Load MAR"), [], inputs
        )


class FastHybridSampler(io.ComfyNode):
    """FastHybrid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARFastHybrid",
            display_name="FastHybrid Sampler",
            category="FastAR/sample",
            description="Drafts the tokens of several AR steps in one diffusion pass, checks each draft against its real "
            "condition when its turn comes, and refines the accepted ones in a few guided steps (CVPR 2026).",
            search_aliases=["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"],
            inputs=_inputs(FastHybridSettings, [_model("model", _ONE)], [_cache(), *_edit()], preset=True),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(
            fasthybrid, FastHybridSettings, expect_model(model, host.Loaded, MARModel, "model", "Load MAR"), [], inputs
        )


class LazyMARSampler(io.ComfyNode):
    """LazyMAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMAR",
            display_name="LazyMAR Sampler",
            category="FastAR/sample",
            description="Plain MAR that computes only what changed since the last step: rows of the transformer that hardly move, "
            "the null branch of guidance and most of the diffusion head come from caches (ICCV 2025).",
            search_aliases=["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"],
            inputs=_inputs(LazyMARSettings, [_model("model", _ONE)], _edit(), preset=True),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample(
            lazymar, LazyMARSettings, expect_model(model, host.Loaded, MARModel, "model", "Load MAR"), [], inputs
        )


@dataclass(frozen=True)
class PresetFor:
    """A widget of LazyMAR Cache."""

    preset_for: str = knob(
        "demo",
        "Which model the preset is meant for; this node does not see it. Without a preset it changes nothing.",
        choices=("demo", "full size"),
        advanced=True,
    )


class LazyMARCache(io.ComfyNode):
    """LazyMAR's settings, to be plugged into another sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="LazyMAR's caches for the cache input of MAR, FastHybrid and CSpD Sampler: how the networks are run, whoever "
            "spends their results. This is how accelerators combine.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            inputs=[*widgets(CacheSettings), _preset(), *widgets(PresetFor)],
            outputs=[CACHE.Output("cache", display_name="cache", tooltip="For the cache input of a MAR sampler.")],
        )

    @classmethod
    def execute(cls, preset: Any = presets.AS_SET, preset_for: Any = "demo", **values: Any) -> io.NodeOutput:
        demo = make(PresetFor, {"preset_for": preset_for}).preset_for == "demo"
        return io.NodeOutput(presets.apply(make(CacheSettings, values), preset, demo))


class CSpDSampler(io.ComfyNode):
    """CSpD."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = [
            _model(
                "draft",
                "A small MAR that drafts tokens, from its own Load MAR; same tokens, grid and classes as the target.",
            ),
            _model("target", "The MAR whose pictures are wanted; it verifies the drafts."),
        ]
        return schema(
            node_id="FastARCSpD",
            display_name="CSpD Sampler",
            category="FastAR/sample",
            description="Continuous speculative decoding: a small MAR drafts the tokens of several AR steps, the target verifies them "
            "together. lossless keeps the target's distribution exactly; published is the paper's code and approximate.",
            search_aliases=["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"],
            inputs=_inputs(CSpDSettings, models, [_cache(), *_edit()], preset=True),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, draft: Any, target: Any, **inputs: Any) -> io.NodeOutput:
        small = expect_model(draft, host.Loaded, MARModel, "draft", "Load MAR")
        large = expect_model(target, host.Loaded, MARModel, "target", "Load MAR")
        return _sample(partial(cspd, draft=small.model), CSpDSettings, large, [small], inputs)


NODES: list[type[io.ComfyNode]] = [MARSampler, FastHybridSampler, LazyMARSampler, LazyMARCache, CSpDSampler]
