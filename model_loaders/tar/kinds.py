"""Kinds of weight files of Tar."""

from __future__ import annotations

from ..files.kind import Kind

# The second name is that of transformers' models with an image reader.
_WORDS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")

KINDS = {
    "dtok": Kind(
        noun="a Tar de-tokenizer",
        field="checkpoint",
        prefixes=("tok_embeddings.weight", "clip_proj."),
        loader="Load Tar De-tokenizer",
        decoder="vq16-t2i",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
    "ta-tok": Kind(
        noun="a TA-Tok",
        field="ta_tok",
        prefixes=("bottleneck.regularizer.",),
        checked=("bf16",),
    ),
    "tar": Kind(
        noun="a Tar language model",
        field="checkpoint",
        prefixes=(_WORDS,),
        general=True,
        folder=True,
        loader="Load Tar",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
}
