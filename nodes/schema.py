"""From settings to ComfyUI widgets, the socket types, and the checks of a node's inputs.

ComfyUI checks the range of typed numbers, but neither NaN nor values that arrive over a link. Every node therefore checks its inputs
again, with the same knobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..samplers import presets
from ..samplers.settings import Knob, knobs
from .layout import ordered

T = TypeVar("T")

MAR = io.Custom("FASTAR_MAR")
TOKEN_MODEL = io.Custom("FASTAR_TOKEN_MODEL")
TAR = io.Custom("FASTAR_TAR")
CONDITION = io.Custom("FASTAR_CONDITION")
REPORT = io.Custom("FASTAR_REPORT")
CACHE = io.Custom("FASTAR_CACHE")

SEED_LIMIT = 0xFFFFFFFFFFFFFFFF


def schema(
    node_id: str,
    sockets: Sequence[io.Input] = (),
    widgets: Sequence[io.Input] = (),
    optional: Sequence[io.Input] = (),
    **about: Any,
) -> io.Schema:
    """An ``io.Schema``. Arguments that this version of ComfyUI does not support (``search_aliases``, say) are left out.

    Args:
        node_id: id of the node.
        sockets: inputs in front of the widgets.
        widgets: in any order; see :mod:`.layout`.
        optional: inputs behind the widgets.
        about: other arguments of ``io.Schema``.
    """
    about |= {"node_id": node_id, "inputs": [*sockets, *ordered(node_id, widgets), *optional]}
    known = {f.name for f in fields(io.Schema)}
    return io.Schema(**{name: value for name, value in about.items() if name in known})


def widgets(settings: type) -> list[io.Input]:
    """One widget per setting."""
    return [widget(name, default, about) for name, (default, about) in knobs(settings).items()]


def widget(name: str, default: Any, about: Knob) -> io.Input:
    """The widget of a setting."""
    shared: dict[str, Any] = {"tooltip": about.tooltip, "advanced": about.advanced or None}
    if about.choices:
        return io.Combo.Input(name, options=list(about.choices), default=default, **shared)
    if isinstance(default, bool):
        return io.Boolean.Input(name, default=default, **shared)
    if isinstance(default, int):
        low, high, step = (None if n is None else int(n) for n in (about.low, about.high, about.step))
        return io.Int.Input(name, default=default, min=low, max=high, step=step, **shared)
    return io.Float.Input(name, default=default, min=about.low, max=about.high, step=about.step, **shared)


def preset(tooltip: str) -> io.Input:
    """The preset widget.

    Args:
        tooltip: effect of the presets.
    """
    return io.Combo.Input(
        "preset",
        options=list(presets.NAMES),
        default=presets.AS_SET,
        advanced=True,
        tooltip=f"as set: the numbers above. {tooltip}",
    )


def sampled(vae: str = "the same loader") -> list[io.Output]:
    """Outputs of a sampler.

    Args:
        vae: loader whose VAE decodes the latent.
    """
    return [
        io.Latent.Output("latent", display_name="latent", tooltip=f"Decode it with VAE Decode and the vae of {vae}."),
        REPORT.Output(
            "report", display_name="report", tooltip="What the sampler did; for Compare, Token Map and Report."
        ),
    ]


def seed() -> io.Input:
    """The seed widget, the same as KSampler's."""
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
    """Check a seed.

    Raises:
        UserError: not an integer from 0 to 2^64 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"seed: {value!r} is not a whole number.")
    if not 0 <= value <= SEED_LIMIT:
        raise UserError(f"seed: {value} is outside 0 to {SEED_LIMIT}.")
    return value


def expect(value: Any, kind: type[T], field: str, source: str) -> T:
    """Check the class of an input.

    Args:
        value: the input.
        kind: required class.
        field: name of the input.
        source: the node whose output fits, for the message.

    Raises:
        UserError: the input is of another class.
    """
    if not isinstance(value, kind):
        raise UserError(f"{field}: it got {describe(value)}; connect the output of {source}.")
    return value


def expect_model(value: Any, holder: type[T], kind: type, field: str, source: str) -> T:
    """Check the family of a loaded model: ``holder`` with attribute ``model`` of class ``kind``."""
    loaded = expect(value, holder, field, source)
    expect(loaded.model, kind, field, source)  # type: ignore[attr-defined]
    return loaded


def expect_image(value: Any, field: str) -> Tensor:
    """Check an IMAGE: pictures [B, H, W, C], 1, 3 or 4 channels.

    Raises:
        UserError: another shape, or an empty batch.
    """
    image = expect(value, torch.Tensor, field, "a node that gives an IMAGE, such as VAE Decode")
    if image.ndim != 4 or image.shape[3] not in (1, 3, 4) or 0 in image.shape:
        raise UserError(f"{field}: it got a tensor {list(image.shape)}; connect pictures [batch, height, width, 3].")
    return image


def describe(value: Any) -> str:
    """A short description of a value for messages."""
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
