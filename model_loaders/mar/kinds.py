"""Kinds of weight files of MAR."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "mar": Kind(
        noun="a MAR",
        field="checkpoint",
        prefixes=("diffloss.net.",),
        loader="Load MAR",
        decoder="kl16",
        checked=("fp16",),
        blocks=True,
    ),
}
