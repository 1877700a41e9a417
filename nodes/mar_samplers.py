"""MAR samplers: each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..assembly import is_demo
from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..samplers import registry
from ..samplers.batches import in_parts
from ..samplers.conditioning import MaskedCondition, PromptCondition
from ..samplers.mar.editing import Edit
from ..samplers.mar.lazymar import LazyTransformer
from ..samplers.mar.loop import Sampled, Sampler
from ..samplers.mar.memory import DECODE, WEIGHTS, estimate, noise_bytes
from ..samplers.mar.settings import CacheSettings
from ..samplers.noise import PairedNoise
from ..samplers.registry import SAMPLERS
from . import host
from .conditioning import as_labels
from .fitting import KL, kind_of, mark
from .schema import (
    CACHE,
    MAR,
    MAR_CONDITION,
    automatic_names,
    checked_seed,
    checked_switch,
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

NOISE_LIMIT = 4 << 30
LOADER = "Load MAR"
# Inputs of a sampler that are not settings.
SOCKETS = ("condition", "seed", "cache", "latent", "mask")


def _model(name: str, tooltip: str) -> io.Input:
    return MAR.Input(name, tooltip=tooltip)


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


def _work_bytes(memory: Mapping[str, int]) -> int:
    """Bytes to keep free for an estimate: all but the weights. The stages are added, because allocators reuse little between them."""
    return sum(count for name, count in memory.items() if not name.startswith(WEIGHTS))


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
    if kind_of(latent["samples"]) not in ("", KL):
        raise UserError(
            "latent: it is of a token model, which has other latents; connect VAE Encode with the vae of Load MAR."
        )
    mask = latent.get("noise_mask") if mask is None else mask
    if mask is None:
        raise UserError("mask: without one nothing of the latent would be kept; paint a mask, or remove the latent.")
    area = expect(mask, torch.Tensor, "mask", "a node that gives a MASK")
    return Edit(latent["samples"], area[None] if area.ndim == 2 else area[:, 0] if area.ndim == 4 else area)


@dataclass(frozen=True)
class CachePlan:
    """Value of a cache socket: the widgets of LazyMAR Cache, whose auto depends on the model that is sampled."""

    values: Mapping[str, Any]


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
        inputs: the node's other inputs by name. Without ``enabled``, the baseline runs with the settings that it shares.
        others: further models that must be on the device.
        cached: whether the sampler caches features.
        more: further arguments of the sampler.
    """
    if not checked_switch(inputs.pop("enabled", True), "enabled"):
        values = shared(SAMPLERS[sampler].settings, SAMPLERS[registry.MAR].settings, inputs)
        inputs = {k: v for k, v in inputs.items() if k in SOCKETS} | values
        sampler, others, cached, more = registry.MAR, (), False, {}
    loaded = expect_mar(model, field)
    kind, demo, width = SAMPLERS[sampler].settings, is_demo(loaded.model), loaded.model.net.config.dim
    values = {k: v for k, v in inputs.items() if k not in SOCKETS}
    settings = settings_of(kind, values, loaded.recommended, demo, width)
    return run_sampler(sampler, loaded, settings, inputs, others, cached, **more)


def run_sampler(
    sampler: str,
    loaded: host.Loaded,
    settings: Any,
    inputs: Mapping[str, Any],
    others: Sequence[host.Loaded] = (),
    cached: bool = False,
    **more: Any,
) -> io.NodeOutput:
    """Run a sampler whose settings are known; arguments as :func:`_sample`, of ``inputs`` only the sockets and the seed."""
    entry = SAMPLERS[sampler]
    condition = _condition(inputs["condition"], loaded.model)
    number, cache = checked_seed(inputs["seed"]), inputs.get("cache")
    edit = _edit_of(inputs.get("latent"), inputs.get("mask"))
    steps, images = settings.diffusion_steps, len(condition)
    if noise_bytes(loaded.model, images, steps) > NOISE_LIMIT:
        raise UserError(
            f"condition: {images} images with {settings.diffusion_steps} diffusion steps need more than "
            f"{NOISE_LIMIT >> 30} GB of noise; ask for fewer images at once, or lower diffusion_steps."
        )
    c, patch = loaded.model.net.config, loaded.model.patch
    if cache is not None:
        if isinstance(cache, CachePlan):
            cache = settings_of(CacheSettings, cache.values, {}, is_demo(loaded.model), c.dim, settings.ar_steps)
        expect(cache, CacheSettings, "cache", "LazyMAR Cache")
    shape = (images, c.channels // patch**2, c.grid * patch, c.grid * patch)
    memory = estimate(loaded.model, condition, settings, settings if cached else cache)
    host.to_device(loaded, _work_bytes(memory), shape, others)

    def start(part: range) -> Sampler:
        own = {} if cache is None else {"transformer": LazyTransformer(cache)}
        area = None if edit is None else edit.of(part) if len(part) < images else edit
        noise = PairedNoise(number, part)
        return entry.run(loaded.model, condition.of(part), settings, noise, number, edit=area, **more, **own)  # type: ignore[return-value]

    done: Sampled = host.drive(in_parts(start, images), loaded.vae)
    if loaded.vae is not None:
        done.report.memory[DECODE] = int(loaded.vae.memory_used_decode(shape, loaded.vae.vae_dtype))
    return io.NodeOutput({"samples": mark(host.to_output(done.latents), KL)}, done.report)


def _condition(value: Any, model: MARModel) -> MaskedCondition:
    """The condition on the socket, of the kind that the model reads.

    Raises:
        UserError: it is of another kind, or the model has no such class.
    """
    if model.condition == PromptCondition.kind:
        return expect(value, PromptCondition, "condition", "Prompt")
    return as_labels(value, model.label_set)


def expect_mar(value: Any, field: str) -> host.Loaded:
    """Check that a socket holds a MAR."""
    return expect_model(value, host.Loaded, MARModel, field, LOADER)


def _schema(
    sampler: str,
    models: list[io.Input] | None = None,
    optional: Sequence[io.Input] = (),
    presets: str | None = "",
    **about: Any,
) -> io.Schema:
    """Schema of a sampler node with the widgets of its settings; ``presets`` extends the preset's tooltip, None is the baseline."""
    condition = MAR_CONDITION.Input(
        "condition", tooltip="What to draw, one entry an image: Class Label for a MAR, Prompt for Harmon and UniPic."
    )
    settings = SAMPLERS[sampler].settings
    switches = [] if presets is None else [preset_widget(presets), enabled("plain MAR")]
    return schema(
        category="FastAR/sample",
        sockets=[
            *(models or [_model("model", "The MAR to sample, from Load MAR, or a Harmon or UniPic from its loader.")]),
            condition,
        ],
        widgets=[seed(), *widgets(settings, automatic_names(settings)), *switches],
        optional=optional,
        outputs=sampled(),
        hidden=hidden(),
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
            presets=None,
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("mar", model, inputs)


class FastHybridSampler(io.ComfyNode):
    """FastHybrid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "fasthybrid",
            node_id="FastARFastHybridSampler",
            display_name="FastHybrid Sampler",
            description="Drafts the tokens of several AR steps in one diffusion pass, checks each draft against its real "
            "condition when its turn comes, and refines the accepted ones in a few guided steps (CVPR 2026).",
            search_aliases=["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"],
            optional=[_cache(), *_edit()],
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("fasthybrid", model, inputs)


class LazyMARSampler(io.ComfyNode):
    """LazyMAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "lazymar",
            node_id="FastARLazyMARSampler",
            display_name="LazyMAR Sampler",
            description="Plain MAR that computes only what changed since the last step: rows of the transformer that hardly move, "
            "the null branch of guidance and most of the diffusion head come from caches (ICCV 2025).",
            search_aliases=["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"],
            optional=_edit(),
            presets="fast also sets ar_steps, diffusion_steps, diffusion_steps_end and order.",
        )

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _sample("lazymar", model, inputs, cached=True)


class LazyMARCache(io.ComfyNode):
    """LazyMAR's settings for another sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARFeatureCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="LazyMAR's caches for the cache input of MAR, FastHybrid and CSpD Sampler: how the networks are run, whoever "
            "spends their results. This is how accelerators combine.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            widgets=[*widgets(CacheSettings, automatic_names(CacheSettings)), preset_widget("")],
            outputs=[CACHE.Output("cache", display_name="cache", tooltip="For the cache input of a MAR sampler.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        settings_of(CacheSettings, values, {}, demo=True)  # checks the values
        return io.NodeOutput(CachePlan(values))


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
            node_id="FastARCSpDSampler",
            display_name="CSpD Sampler",
            description="Continuous speculative decoding: a small MAR drafts the tokens of several AR steps, the target verifies them "
            "together. lossless keeps the target's distribution exactly; published is the paper's code and approximate.",
            search_aliases=["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"],
            models=models,
            optional=[_cache(), *_edit()],
        )

    @classmethod
    @reported
    def execute(cls, draft: Any, target: Any, **inputs: Any) -> io.NodeOutput:
        small = expect_mar(draft, "draft")
        return _sample("cspd", target, inputs, "target", [small], draft=small.model)


NODES: list[type[io.ComfyNode]] = [MARSampler, FastHybridSampler, LazyMARSampler, LazyMARCache, CSpDSampler]
