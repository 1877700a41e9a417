"""From settings to ComfyUI widgets, our socket types, and the checks every node makes before it works.

ComfyUI checks ranges of numbers that were typed, but not of NaN, nor of numbers or objects that come over a link; so every
node checks again, with the same knobs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..samplers.settings import Knob, knobs

T = TypeVar("T")

MAR = io.Custom("FASTAR_MAR")
TOKEN_MODEL = io.Custom("FASTAR_TOKEN_MODEL")
TAR = io.Custom("FASTAR_TAR")
CONDITION = io.Custom("FASTAR_CONDITION")
REPORT = io.Custom("FASTAR_REPORT")
CACHE = io.Custom("FASTAR_CACHE")

SEED_LIMIT = 0xFFFFFFFFFFFFFFFF


def schema(**about: Any) -> io.Schema:
    """An ``io.Schema``; what this ComfyUI does not know yet (search aliases, say) is left out."""
    known = {f.name for f in fields(io.Schema)}
    return io.Schema(**{name: value for name, value in about.items() if name in known})


def widgets(settings: type) -> list[io.Input]:
    """One widget a setting: the main ones first, then the advanced, each group in the order of the fields.

    Saved graphs keep widget values by position: a main setting that is added later must not push the advanced ones, so
    ``tests/nodes`` holds every node's order and fails if one moves.
    """
    both = [(name, default, about) for name, (default, about) in knobs(settings).items()]
    return [widget(*entry) for entry in sorted(both, key=lambda entry: entry[2].advanced)]


def widget(name: str, default: Any, about: Knob) -> io.Input:
    """The widget of one setting."""
    shared: dict[str, Any] = {"tooltip": about.tooltip, "advanced": about.advanced or None}
    if about.choices:
        return io.Combo.Input(name, options=list(about.choices), default=default, **shared)
    if isinstance(default, bool):
        return io.Boolean.Input(name, default=default, **shared)
    if isinstance(default, int):
        low, high, step = (None if n is None else int(n) for n in (about.low, about.high, about.step))
        return io.Int.Input(name, default=default, min=low, max=high, step=step, **shared)
    return io.Float.Input(name, default=default, min=about.low, max=about.high, step=about.step, **shared)


def seed() -> io.Input:
    """The seed widget, as KSampler's."""
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=SEED_LIMIT,
        control_after_generate=True,
        tooltip="Decides all randomness: token order and noise. Samplers with the same seed draw the same picture, as far as "
        "their methods allow; image i of a batch uses (seed, i), so it is the same picture made alone.",
    )


# ------------------------------------------------------------------------------------------------ checks


def checked_seed(value: Any) -> int:
    """The seed, if it is one.

    Raises:
        UserError: no whole number from 0 to 2^64 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"seed: {value!r} is not a whole number.")
    if not 0 <= value <= SEED_LIMIT:
        raise UserError(f"seed: {value} is outside 0 to {SEED_LIMIT}.")
    return value


def expect(value: Any, kind: type[T], field: str, source: str) -> T:
    """The object on a socket, if it is what the socket is for.

    Args:
        value: what arrived.
        kind: class it must be of.
        field: the input's name.
        source: which node gives such a thing.

    Raises:
        UserError: it is anything else.
    """
    if not isinstance(value, kind):
        raise UserError(f"{field}: it got {told(value)}; connect the output of {source}.")
    return value


def expect_model(value: Any, holder: type[T], kind: type, field: str, source: str) -> T:
    """The loaded model on a socket, if it is of the right family: ``holder`` with ``model`` of ``kind``."""
    loaded = expect(value, holder, field, source)
    expect(loaded.model, kind, field, source)  # type: ignore[attr-defined]
    return loaded


def expect_image(value: Any, field: str) -> Tensor:
    """Pictures [B, H, W, C] on an IMAGE socket.

    Raises:
        UserError: no pictures, or none in the batch.
    """
    image = expect(value, torch.Tensor, field, "a node that gives an IMAGE, such as VAE Decode")
    if image.ndim != 4 or image.shape[3] not in (1, 3, 4) or 0 in image.shape:
        raise UserError(f"{field}: it got a tensor {list(image.shape)}; connect pictures [batch, height, width, 3].")
    return image


def told(value: Any) -> str:
    """What a value is, in a person's words."""
    if value is None:
        return "nothing"
    if isinstance(value, (str, int, float, bool)):
        return f"the text {value[:60]!r}" if isinstance(value, str) else f"the number {value!r}"
    if isinstance(value, dict) and "samples" in value:
        return "a LATENT"
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    inner = getattr(value, "model", value)
    return f"a {type(inner).__name__}"
