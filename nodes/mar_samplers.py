"""MAR samplers: each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..assembly import is_demo
from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..samplers import presets
from ..samplers.conditioning import Condition
from ..samplers.mar.denoiser import Denoiser
from ..samplers.mar.editing import Edit
from ..samplers.mar.lazymar import LazyTransformer
from ..samplers.mar.loop import Sampled
from ..samplers.mar.settings import CacheSettings
from ..samplers.noise import PairedNoise
from ..samplers.registry import SAMPLERS
from ..samplers.settings import knob, make
from . import host
from .schema import CACHE, CONDITION, MAR, checked_seed, expect, expect_model, sampled, schema, seed, widgets
from .schema import preset as preset_widget

NOISE_LIMIT = 4 << 30
LOADER = "Load MAR"


def _model(name: str, tooltip: str) -> io.Input:
    return MAR.Input(name, tooltip=tooltip)


def _preset(more: str = "") -> io.Input:
    return preset_widget(
        "exact, balanced and fast replace the settings by measured values, the demo's own for the demo and the papers' for full-size "
        f"models; the report lists them.{more}"
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


def _noise_bytes(model: MARModel, images: int, steps: int) -> float:
    """Bytes of the noise of ``steps`` diffusion steps."""
    return 4.0 * images * (steps + 2) * model.net.config.tokens * model.net.config.channels


def _work_bytes(model: MARModel, images: int, steps: int, cached: bool) -> float:
    """Upper estimate of working memory: noise, transformer rows of both guidance branches, head modulations, caches."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    rows = 2 * images * 2 * (c.buffer + c.tokens)
    kept = images * 2 * (c.encoder_depth + c.decoder_depth + 2) * (c.buffer + c.tokens) * c.dim * size if cached else 0
    return _noise_bytes(model, images, steps) + rows * c.dim * 16 * size + 3 * Denoiser.budget * size + kept


def _edit_of(latent: Any, mask: Any) -> Edit | None:
    """The edit of the two optional sockets; None if both are unconnected."""
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
    sampler: str,
    model: Any,
    inputs: dict[str, Any],
    field: str = "model",
    others: Sequence[host.Loaded] = (),
    cached: bool = False,
    **more: Any,
) -> io.NodeOutput:
    """Check the inputs that all MAR samplers share, make room, run.

    Args:
        sampler: name in the registry.
        model: value of the model socket named ``field``.
        inputs: the node's other inputs by name.
        others: further models that must be on the device.
        cached: whether the sampler caches features.
        more: further arguments of the sampler.
    """
    entry, loaded = SAMPLERS[sampler], _loaded(model, field)
    condition = expect(inputs.pop("condition"), Condition, "condition", "Class Label")
    number = checked_seed(inputs.pop("seed"))
    preset, cache = inputs.pop("preset", presets.AS_SET), inputs.pop("cache", None)
    edit = _edit_of(inputs.pop("latent", None), inputs.pop("mask", None))
    settings: Any = presets.apply(
        make(entry.settings, inputs), preset, is_demo(loaded.model), loaded.model.net.config.dim
    )
    steps, images = settings.diffusion_steps, len(condition)
    if _noise_bytes(loaded.model, images, steps) > NOISE_LIMIT:
        raise UserError(
            f"condition: {images} images with {settings.diffusion_steps} diffusion steps need more than "
            f"{NOISE_LIMIT >> 30} GB of noise; ask for fewer images at once, or lower diffusion_steps."
        )
    if cache is not None:
        more["transformer"] = LazyTransformer(expect(cache, CacheSettings, "cache", "LazyMAR Cache"))
    c, patch = loaded.model.net.config, loaded.model.patch
    shape = (images, c.channels // patch**2, c.grid * patch, c.grid * patch)
    host.to_device(loaded, _work_bytes(loaded.model, images, steps, cached or cache is not None), shape, others)
    noise = PairedNoise(number, range(images))
    done: Sampled = host.drive(
        entry.run(loaded.model, condition, settings, noise, number, edit=edit, **more), loaded.vae
    )
    return io.NodeOutput({"samples": host.to_output(done.latents)}, done.report)


def _loaded(value: Any, field: str) -> host.Loaded:
    return expect_model(value, host.Loaded, MARModel, field, LOADER)


def _schema(
    sampler: str,
    models: list[io.Input] | None = None,
    optional: Sequence[io.Input] = (),
    preset: str | None = "",
    **about: Any,
) -> io.Schema:
    """Schema of a sampler node with the widgets of its settings; ``preset`` extends the preset's tooltip, None leaves it out."""
    condition = CONDITION.Input("condition", tooltip="What to draw, one entry an image, from Class Label.")
    return schema(
        category="FastAR/sample",
        sockets=[*(models or [_model("model", "The MAR to sample, from Load MAR.")]), condition],
        widgets=[seed(), *widgets(SAMPLERS[sampler].settings), *([] if preset is None else [_preset(preset)])],
        optional=optional,
        outputs=sampled(),
        **about,
    )


class MARSampler(io.ComfyNode):
    """Plain MAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "mar",
            node_id="FastARMARSampler",
            display_name="MAR Sampler",
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
            optional=[_cache(), *_edit()],
            preset=None,
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("mar", model, inputs)


class FastHybridSampler(io.ComfyNode):
    """FastHybrid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "fasthybrid",
            node_id="FastARFastHybrid",
            display_name="FastHybrid Sampler",
            description="Drafts the tokens of several AR steps in one diffusion pass, checks each draft against its real "
            "condition when its turn comes, and refines the accepted ones in a few guided steps (CVPR 2026).",
            search_aliases=["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"],
            optional=[_cache(), *_edit()],
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("fasthybrid", model, inputs)


class LazyMARSampler(io.ComfyNode):
    """LazyMAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "lazymar",
            node_id="FastARLazyMAR",
            display_name="LazyMAR Sampler",
            description="Plain MAR that computes only what changed since the last step: rows of the transformer that hardly move, "
            "the null branch of guidance and most of the diffusion head come from caches (ICCV 2025).",
            search_aliases=["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"],
            optional=_edit(),
            preset=" fast also sets ar_steps, diffusion_steps, diffusion_steps_end and order.",
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("lazymar", model, inputs, cached=True)


@dataclass(frozen=True)
class PresetFor:
    """The widget of LazyMAR Cache that selects the presets."""

    preset_for: str = knob(
        "demo",
        "Which model the preset is meant for; this node does not see it. Without a preset it changes nothing.",
        choices=("demo", "full size"),
        advanced=True,
    )


class LazyMARCache(io.ComfyNode):
    """LazyMAR's settings for another sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="LazyMAR's caches for the cache input of MAR, FastHybrid and CSpD Sampler: how the networks are run, whoever "
            "spends their results. This is how accelerators combine.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            widgets=[*widgets(CacheSettings), _preset(), *widgets(PresetFor)],
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
        return _schema(
            "cspd",
            node_id="FastARCSpD",
            display_name="CSpD Sampler",
            description="Continuous speculative decoding: a small MAR drafts the tokens of several AR steps, the target verifies them "
            "together. lossless keeps the target's distribution exactly; published is the paper's code and approximate.",
            search_aliases=["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"],
            models=models,
            optional=[_cache(), *_edit()],
        )

    @classmethod
    def execute(cls, draft: Any, target: Any, **inputs: Any) -> io.NodeOutput:
        small = _loaded(draft, "draft")
        return _sample("cspd", target, inputs, "target", [small], draft=small.model)


NODES: list[type[io.ComfyNode]] = [MARSampler, FastHybridSampler, LazyMARSampler, LazyMARCache, CSpDSampler]
