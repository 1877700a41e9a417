"""Kinds of weight files of Janus."""

from __future__ import annotations

from ..files.kind import Kind

_JANUS = ("gen_head.vision_head.", "model.generation_head.vision_head.")

KINDS = {
    "janus": Kind(
        noun="a Janus",
        field="checkpoint",
        prefixes=(_JANUS,),
        folder=True,
        loader="Load Janus",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
}
