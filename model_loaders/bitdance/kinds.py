"""Kinds of weight files of BitDance."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "bitdance": Kind(
        noun="a BitDance",
        field="checkpoint",
        # An ImageNet model; or the language model of a text model, whose other parts lie beside it.
        prefixes=(("head.net.ada_ln_blocks.", "model.layers.0.self_attn.q_norm."),),
        folder=True,
        loader="Load BitDance",
        decoder="bitdance-ae",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
        untested=True,
    ),
    "bitdance-fp8": Kind(
        noun="one of BitDance's three fp8 files for ComfyUI, which lack the configuration and the tokenizer",
        field="checkpoint",
        prefixes=(("diffusion_head.net.", "vision_head.net.", "net.ada_ln_blocks."), ("projector.fc1.", "fc1.")),
        remedy="choose the entry bitdance-14b-64x, and dtype fp8 or int8",
    ),
    "bitdance-head": Kind(
        noun="the diffusion head of a BitDance only",
        field="checkpoint",
        prefixes=("net.ada_ln_blocks.",),
        remedy="choose the folder with config.json and the shards of the language model",
    ),
    "bitdance-ae": Kind(
        noun="a binary autoencoder",
        field="decoder",
        prefixes=("decoder.adaptive.0.gamma.", "encoder.down."),
    ),
}
