"""Kinds of weight files of the toy family."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "toy": Kind(noun="a toy", field="checkpoint", prefixes=("toy_scale",), loader="Load Toy", decoder="demo-kl"),
}
