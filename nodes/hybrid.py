"""Harmon and UniPic: their loader, and the node that holds their prompts. Every MAR sampler samples them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from comfy_api.latest import io

from .. import assembly
from ..assembly import AUTO
from ..errors import UserError
from ..model_loaders.checkpoint import INT8
from ..model_loaders.networks.prompts import UNCONDITIONAL, HybridModel
from ..model_loaders.networks.speed import PLAIN
from ..samplers import registry
from ..samplers.conditioning import PromptCondition
from ..samplers.settings import knob, make
from . import host
from .loaders import make_vae, menu, source_of, speed_widget, usual
from .schema import MAR, PROMPT, expect, schema, widgets

MOST_IMAGES = 256
# Pixels per side on the menu, and pixels per token of the official models.
SIZES, PIXELS = (256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024), 16
_DTYPES = (AUTO, "fp32", "bf16", INT8)


@dataclass(frozen=True)
class PromptSettings:
    """Widgets of Prompt that are not text."""

    images: int = knob(
        1,
        "Pictures of the prompt; more makes the batch larger, which costs time and memory but less than separate runs. Usual: 1 to 4.",
        low=1,
        high=MOST_IMAGES,
        step=1,
    )


class LoadHybrid(io.ComfyNode):
    """A Harmon or UniPic and its decoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = menu("hybrid")
        return schema(
            node_id="FastARLoadHybrid",
            display_name="Load Harmon / UniPic",
            category="FastAR/load",
            description="Loads a Harmon or UniPic, which draw from a prompt: a MAR with a language model inside. For the same samplers as "
            "Load MAR. The official weights may not be used commercially; they are downloaded when the graph runs, once.",
            search_aliases=["harmon", "unipic", "skywork", "text to image", "hybrid loader", "load checkpoint"],
            widgets=[
                io.Combo.Input(
                    "checkpoint",
                    options=models,
                    default=usual(models, "demo-hybrid", "harmon-0.5b"),
                    tooltip="Your own files go into models/fastar: a folder, shards, .safetensors, .pth or .bin, with a Qwen2.5 tokenizer "
                    "beside them. Entries with a size are downloaded when the graph runs; the official ones are for non-commercial use.",
                ),
                io.Combo.Input(
                    "decoder",
                    options=menu("kl", AUTO),
                    default=AUTO,
                    tooltip="The autoencoder that turns latents into pictures. auto takes the one the checkpoint was trained with.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(_DTYPES),
                    default=AUTO,
                    tooltip="Precision of the model. auto: bf16 on a graphics card made for it, else fp32. fp32 is exact and needs "
                    "twice the memory. fp16 is not offered, because the language model overflows in it.",
                ),
                io.Combo.Input(
                    "size",
                    options=[AUTO, *map(str, SIZES)],
                    default=AUTO,
                    advanced=True,
                    tooltip="Pixels per side. auto: the size the model was trained for, 512 for Harmon and 1024 for UniPic. Others run and "
                    "usually look worse; the report notes it.",
                ),
                speed_widget(diffusion_head=True),
            ],
            outputs=[
                MAR.Output("model", display_name="model", tooltip="For MAR Sampler and its accelerated relatives."),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, dtype: str, size: str = AUTO, speed: str = PLAIN) -> io.NodeOutput:
        if dtype not in _DTYPES:
            raise UserError(f"dtype: {dtype!r} is none of {', '.join(_DTYPES)}; choose one of them.")
        source = source_of(dtype, speed)
        ready = assembly.load(registry.HYBRID, checkpoint, source, decoder, _grid(size))
        model, vae = cast(HybridModel, ready.model), make_vae(cast(Any, ready.decoder), ready.latent_channels)
        if size != AUTO and vae.downscale_ratio * model.patch != PIXELS:
            raise UserError(f"size: {model.name} has tokens of another size than {PIXELS} pixels; choose {AUTO}.")
        return io.NodeOutput(host.Loaded.of(model, vae, None, assembly.defaults(ready)), vae)


def _grid(size: Any) -> int | None:
    """Tokens per side of the size widget; None for auto.

    Raises:
        UserError: not a choice of the menu.
    """
    if size == AUTO:
        return None
    found = next((n for n in SIZES if str(n) == str(size)), None)
    if found is None:
        raise UserError(f"size: {size!r} is none of {AUTO}, {', '.join(map(str, SIZES))}; choose one of them.")
    return found // PIXELS


class Prompt(io.ComfyNode):
    """A prompt for Harmon and UniPic."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARPrompt",
            display_name="Prompt",
            category="FastAR/condition",
            description="What to draw, in words, for Harmon and UniPic. The model that samples reads the prompt itself.",
            search_aliases=["text prompt", "harmon prompt", "unipic prompt", "positive", "negative"],
            widgets=[
                io.String.Input(
                    "text",
                    default="a red boat at sunset",
                    multiline=True,
                    placeholder="what to draw",
                    tooltip="The prompt, read as typed; it may be empty. The authors' benchmark prompts ended with a full stop.",
                ),
                *widgets(PromptSettings),
                io.String.Input(
                    "negative",
                    default=UNCONDITIONAL,
                    multiline=True,
                    advanced=True,
                    tooltip="What guidance leads away from: a whole instruction, not a list of words. Usual, and what the models "
                    f"were trained with: {UNCONDITIONAL}",
                ),
            ],
            outputs=[
                PROMPT.Output(
                    "condition", display_name="condition", tooltip="For the MAR samplers, with Harmon or UniPic."
                )
            ],
        )

    @classmethod
    def execute(cls, text: Any, negative: Any = UNCONDITIONAL, **values: Any) -> io.NodeOutput:
        settings = make(PromptSettings, values)
        prompt = expect(text, str, "text", "a text node, or type it")
        away = expect(negative, str, "negative", "a text node, or type it")
        return io.NodeOutput(PromptCondition((prompt,) * settings.images, away))


NODES: list[type[io.ComfyNode]] = [LoadHybrid, Prompt]
