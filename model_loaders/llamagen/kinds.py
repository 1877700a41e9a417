"""Kinds of weight files of LlamaGen and PAR."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "llamagen": Kind(
        noun="a LlamaGen or PAR",
        field="checkpoint",
        prefixes=("tok_embeddings.weight", "cls_embedding."),
        loader="Load LlamaGen / PAR",
        decoder="vq16-c2i",
        checked=("bf16", "fp16"),
        blocks=True,
        four_bits=True,
    ),
    "t5": Kind(
        noun="a T5 text encoder",
        field="encoder",
        prefixes=("encoder.block.0.layer.0.SelfAttention.",),
        folder=True,
        checked=("bf16",),
        overflows=True,
    ),
}
