"""What a user would take instead, with random weights of the same shapes.

Janus-Pro of the package transformers, and the authors' MAR and LlamaGen of a checkout, which have the weights of ours.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...model_loaders.catalogue.official import JANUS_SIZES
from ..experiments import references
from ..work import sizes
from .measure import Save, TimeUp, wait

# An image that takes longer is drawn once; the authors' MAR-L takes 27 s at first. The others are drawn again, warm.
_LONG = 40.0
# The model's own: words, the ids of its beginning, padding and image, and prompts as long as ours.
_WORDS = 102_400
_BEGIN, _PADDING, _IMAGE = 100_000, 100_002, 100_016
_PROMPT = 16
_CFG = 5.0
# Sizes of what draws no image but is a part of the model; a rehearsal has smaller ones.
VISION: dict[str, Any] = {}
TOKENIZER: dict[str, Any] = {}
# AR steps and diffusion steps of the authors' MAR, and guidance scales, of their evaluations.
MAR_STEPS = {"steps": 64, "diffusion_steps": 100}
_MAR_CFG, _LLAMAGEN_CFG = 3.0, 4.0
# The kinds that their authors compile.
COMPILED = ("static", "llamagen")


@dataclass(eq=False)
class Theirs:
    """A program that draws an image with :attr:`draw`; :attr:`compile` compiles it, for kinds in :data:`COMPILED`."""

    draw: Callable[[], None]
    compile: Callable[[], None] = lambda: None


def build(kind: str, size: str, checkout: Path | None, device: torch.device) -> Theirs:
    """A program of a case's ``theirs``: see :class:`.cases.Case`."""
    if kind in ("static", "dynamic"):
        return _janus(size, kind, device)

    assert checkout is not None, "without a checkout the case is left out"
    if kind == "mar":
        return _mar(size, checkout, device)
    return _llamagen(size, checkout, device)


def images(
    theirs: Theirs, compiled: bool, found: dict[str, Any], save: Save, limit: float, device: torch.device
) -> None:
    """Draw images as a user would; writes seconds and memory into ``found``."""
    if compiled:
        theirs.compile()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    found["seconds"] = []
    for _ in range(3 if compiled else 2):
        began = time.perf_counter()
        theirs.draw()
        wait(device)
        found["seconds"].append(round(time.perf_counter() - began, 4))
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        save()
        if found["seconds"][0] > _LONG and not compiled:
            return
        if time.monotonic() > limit:
            raise TimeUp


# ------------------------------------------------------------------------------------------------ the authors'


def _mar(size: str, checkout: Path, device: torch.device) -> Theirs:
    """LTH14/mar as its evaluation runs it: autocast to fp16."""
    model: Any = sizes.random_model(size, "fp32", device).model
    with references.checkout(checkout) as load, torch.device(device):
        net = references.mar_network(load("models.mar"), model, MAR_STEPS["diffusion_steps"])
    label = torch.tensor([0], device=device)

    @torch.no_grad()
    def draw() -> None:
        with _device(device), torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            net.sample_tokens(1, MAR_STEPS["steps"], _MAR_CFG, "linear", label, 1.0)

    return Theirs(draw)


def _llamagen(size: str, checkout: Path, device: torch.device) -> Theirs:
    """FoundationVision/LlamaGen as its sampling program runs it: in bf16, compiled if that is asked."""
    model: Any = sizes.random_model(size, "fp32", device).model
    with references.checkout(checkout) as load:
        networks = load("autoregressive.models.gpt")
        generate = load("autoregressive.models.generate").generate

    with torch.device(device):
        net: Any = references.llamagen_network(networks, model)
    if device.type == "cuda":
        net.to(torch.bfloat16)
    label = torch.tensor([0], device=device)

    def draw() -> None:
        generate(net, label, model.tokens, cfg_scale=_LLAMAGEN_CFG, temperature=1.0, top_k=2000, top_p=1.0)

    def compile_network() -> None:
        net.compile(mode="reduce-overhead", fullgraph=True)

    return Theirs(draw, compile_network)


def _device(device: torch.device) -> AbstractContextManager[Any]:
    """Their code asks for a GPU; on a CPU it gets none."""
    return references.on_cpu() if device.type == "cpu" else nullcontext()


# ------------------------------------------------------------------------------------------------ transformers


def _janus(size: str, cache: str, device: torch.device) -> Theirs:
    """A Janus-Pro of transformers, built on the device; ``cache``: "static" or "dynamic"."""
    from transformers import (
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    dim, depth, heads, hidden = JANUS_SIZES[size]
    text = LlamaConfig(
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=hidden,
        vocab_size=_WORDS,
        max_position_embeddings=16384,
    )
    vision = JanusVisionConfig(projection_dim=dim, **VISION)
    tokenizer = JanusVQVAEConfig(projection_dim=dim, image_token_embed_dim=dim, **TOKENIZER)
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=tokenizer)

    with torch.device(device):
        net: Any = JanusForConditionalGeneration(config).eval()
    if device.type == "cuda":
        net.to(torch.bfloat16)

    def compile_decoder() -> None:
        decoder = net.model.language_model
        decoder.forward = torch.compile(decoder.forward, mode="reduce-overhead")

    return Theirs(partial(_janus_image, net, cache, device), compile_decoder)


@torch.no_grad()
def _janus_image(net: Any, cache: str, device: torch.device) -> None:
    """The tokens of an image with guidance."""
    from transformers import DynamicCache, GenerationConfig

    ids = torch.arange(1, _PROMPT + 1, device=device)[None]
    ids[0, 0], ids[0, -1] = _BEGIN, _IMAGE
    config: Any = GenerationConfig(
        do_sample=True,
        guidance_scale=_CFG,
        bos_token_id=_BEGIN,
        pad_token_id=_PADDING,
        use_cache=True,
        max_length=_PROMPT + net.model.vision_model.config.num_image_tokens,
    )
    config.generation_kwargs = {"boi_token_id": _IMAGE}

    more: dict[str, Any] = {}
    if cache == "dynamic":
        # The name of the argument depends on the version.
        source = inspect.getsource(type(net).generate)
        name = "past_key_values" if '"past_key_values"' in source else "cache"
        more[name] = DynamicCache()

    tokens = net.generate(
        ids, attention_mask=torch.ones_like(ids), generation_mode="image", generation_config=config, **more
    )
    assert tokens.shape == (1, net.model.vision_model.config.num_image_tokens)
