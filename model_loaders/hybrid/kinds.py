"""Kinds of weight files of Harmon and UniPic."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "hybrid": Kind(
        noun="a Harmon or UniPic",
        field="checkpoint",
        prefixes=("mar.fake_latent", "llm.model.embed_tokens."),
        folder=True,
        loader="Load Harmon / UniPic",
        decoder="kl16",
        checked=("bf16",),
        overflows=True,
        blocks=True,
    ),
    "tokenizer": Kind(noun="a tokenizer", field="checkpoint", folder=True),
}
