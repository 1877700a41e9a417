"""What a user would take instead: Janus-Pro of the package transformers, with random weights of the same shapes."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

from ...model_loaders.official import JANUS_SIZES
from .measure import Save, TimeUp, wait

# An image that takes longer is drawn once.
_LONG = 8.0
# The model's own: words, the ids of its beginning, padding and image, and prompts as long as ours.
_WORDS = 102_400
_BEGIN, _PADDING, _IMAGE = 100_000, 100_002, 100_016
_PROMPT = 16
_CFG = 5.0
# Sizes of what draws no image but is a part of the model; a rehearsal has smaller ones.
VISION: dict[str, Any] = {}
TOKENIZER: dict[str, Any] = {}


def build(size: str, device: torch.device) -> Any:
    """A Janus-Pro of transformers, built on the device."""
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
        net = JanusForConditionalGeneration(config).eval()
    return net.to(torch.bfloat16) if device.type == "cuda" else net


def images(
    net: Any, cache: str, compiled: bool, found: dict[str, Any], save: Save, limit: float, device: torch.device
) -> None:
    """Draw images as a user would; writes seconds and memory into ``found``."""
    model = net.model
    if compiled:
        model.language_model.forward = torch.compile(model.language_model.forward, mode="reduce-overhead")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    found["seconds"] = []
    for _ in range(3 if compiled else 2):
        began = time.perf_counter()
        _image(net, cache, device)
        wait(device)
        found["seconds"].append(round(time.perf_counter() - began, 4))
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        save()
        if found["seconds"][0] > _LONG and not compiled:
            return
        if time.monotonic() > limit:
            raise TimeUp


@torch.no_grad()
def _image(net: Any, cache: str, device: torch.device) -> None:
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
