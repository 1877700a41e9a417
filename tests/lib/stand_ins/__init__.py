"""Nodes for ComfyUI that stand in for models of other packs, and one that tells what it gets."""

from typing import Any
from unittest.mock import MagicMock

import torch


class Any_(str):
    """Every type of socket."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = Any_("*")


def _conditioning() -> list[Any]:
    return [[torch.zeros(1, 4, 8), {"pooled_output": torch.zeros(1, 8)}]]


def _model(kind: str) -> Any:
    """An object that answers every call."""
    made = MagicMock(name=kind)
    cpu = torch.device("cpu")
    made.load_device = made.patcher.load_device = cpu
    made.encode_from_tokens_scheduled.side_effect = lambda *a, **k: _conditioning()
    seen = made.encode_image.return_value
    seen.image_embeds = torch.zeros(1, 8)
    made.model.additional_in_dim = 0
    made.get_model_object.return_value.process_in.side_effect = lambda x: x
    made.get_model_object.return_value.process_out.side_effect = lambda x: x
    made.model_dtype.return_value = torch.float32
    return made


class StandIn:
    RETURN_TYPES = (ANY,)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"kind": ("STRING", {})}}

    def make(self, kind: str):
        return (_conditioning() if kind == "CONDITIONING" else _model(kind),)


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(describe, value)) + "]"
    return type(value).__name__


class Tell:
    RETURN_TYPES = ()
    FUNCTION = "tell"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": (ANY, {})}}

    def tell(self, value: Any):
        return {"ui": {"text": [describe(value)]}}


NODE_CLASS_MAPPINGS = {"StandIn": StandIn, "Tell": Tell}
