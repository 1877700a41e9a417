"""Samplers on a MAR. Each node checks its inputs, makes room on the device and drives one generator."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..samplers.conditioning import Condition
from ..samplers.fasthybrid import fasthybrid
from ..samplers.mar import Denoiser, Sampled, mar
from ..samplers.noise import PairedNoise
from ..samplers.settings import FastHybridSettings, MARSettings, make
from . import host
from .schema import CONDITION, MAR, REPORT, checked_seed, expect, expect_model, schema, seed, widgets

NOISE_LIMIT = 4 << 30


def _inputs(settings: type[MARSettings]) -> list[io.Input]:
    return [
        MAR.Input("model", tooltip="The MAR to sample, from Load MAR."),
        CONDITION.Input("condition", tooltip="What to draw, one entry an image, from Class Label."),
        seed(),
        *widgets(settings),
    ]


def _outputs() -> list[io.Output]:
    return [
        io.Latent.Output("latent", display_name="latent", tooltip="Decode it with VAE Decode and the vae of the same loader."),
        REPORT.Output("report", display_name="report", tooltip="What the sampler did; for Compare, Token Map and Report."),
    ]


def _work_bytes(model: MARModel, images: int, settings: MARSettings) -> float:
    """Upper estimate of working memory: noise, transformer rows of both guidance branches, head modulations."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    rows = 2 * images * 2 * (c.buffer + c.tokens)
    return _noise_bytes(model, images, settings) + rows * c.dim * 16 * size + 3 * Denoiser.budget * size


def _noise_bytes(model: MARModel, images: int, settings: MARSettings) -> float:
    steps = settings.diffusion_steps + (settings.guided_steps if isinstance(settings, FastHybridSettings) else 0)
    return 4.0 * images * (steps + 2) * model.net.config.tokens * model.net.config.channels


def _sample(method: Any, kind: type[MARSettings], model: Any, condition: Any, seed: Any, values: dict[str, Any]) -> io.NodeOutput:
    loaded = expect_model(model, host.Loaded, MARModel, "model", "Load MAR")
    what = expect(condition, Condition, "condition", "Class Label")
    number, settings = checked_seed(seed), make(kind, values)
    if _noise_bytes(loaded.model, len(what), settings) > NOISE_LIMIT:
        raise UserError(
            f"condition: {len(what)} images with {settings.diffusion_steps} diffusion steps need more than "
            f"{NOISE_LIMIT >> 30} GB of noise; ask for fewer images at once, or lower diffusion_steps."
        )
    c, patch = loaded.model.net.config, loaded.model.patch
    shape = (len(what), c.channels // patch**2, c.grid * patch, c.grid * patch)
    host.to_device(loaded, _work_bytes(loaded.model, len(what), settings), shape)
    done: Sampled = host.drive(method(loaded.model, what, settings, PairedNoise(number, range(len(what))), number), loaded.vae)
    return io.NodeOutput({"samples": host.to_output(done.latents)}, done.report)


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
            search_aliases=["masked autoregressive", "mar", "autoregressive sampler", "baseline sampler"],
            inputs=_inputs(MARSettings),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, condition: Any, seed: Any, **values: Any) -> io.NodeOutput:
        return _sample(mar, MARSettings, model, condition, seed, values)


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
            inputs=_inputs(FastHybridSettings),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: Any, condition: Any, seed: Any, **values: Any) -> io.NodeOutput:
        return _sample(fasthybrid, FastHybridSettings, model, condition, seed, values)


NODES: list[type[io.ComfyNode]] = [MARSampler, FastHybridSampler]
