"""Tar as a family: its models are the de-tokenizers, which draw from the codes of its language model."""

from __future__ import annotations

from ...model_loaders.tar.loader import load_detokenizer
from .tokens import TokenFamily

FAMILY = TokenFamily(
    name="tar",
    words="a Tar de-tokenizer",
    load_file=load_detokenizer,
    files="dtok",
    reads=("codes",),
    demo=("demo-dtok", "demo-dtok-low"),
    usual_samplers=("tar", "zipar"),
    drafted_samplers=("mulosd",),
)
