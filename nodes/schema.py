"""From settings to ComfyUI widgets, the socket types, and the checks of a node's inputs.

ComfyUI checks the range of typed numbers, but neither NaN nor values that arrive over a link. Every node therefore checks its inputs
again, with the same knobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..samplers import presets
from ..samplers.settings import Knob, knobs

T = TypeVar("T")

MAR = io.Custom("FASTAR_MAR")
TOKEN_MODEL = io.Custom("FASTAR_TOKEN_MODEL")
TAR = io.Custom("FASTAR_TAR")
# Conditions by kind, so that a node of another kind does not connect.
LABEL = io.Custom("FASTAR_LABEL")
TEXT = io.Custom("FASTAR_TEXT")
CODES = io.Custom("FASTAR_CODES")
PROMPT = io.Custom("FASTAR_PROMPT")
MAR_CONDITION = io.Custom("FASTAR_LABEL,FASTAR_PROMPT")
TOKEN_CONDITION = io.Custom("FASTAR_LABEL,FASTAR_PROMPT,FASTAR_TEXT,FASTAR_CODES")
ANY_CONDITION = io.Custom("FASTAR_LABEL,FASTAR_PROMPT,FASTAR_TEXT,FASTAR_CODES")
ANY_MODEL = io.Custom("FASTAR_MAR,FASTAR_TOKEN_MODEL")
REPORT = io.Custom("FASTAR_REPORT")
CACHE = io.Custom("FASTAR_CACHE")

AUTO = "auto"
# Of nodes that run any sampler.
ANY_SOCKETS = [
    ANY_MODEL.Input("model", tooltip="The model to sample, from any loader of a MAR or a token model."),
    ANY_CONDITION.Input("condition", tooltip="What to draw, one entry an image; as for the sampler's own node."),
]
ANY_DRAFT = ANY_MODEL.Input("draft", optional=True, tooltip="The draft model of CSpD and MuLo-SD.")

# Hidden inputs of nodes that show text and write reports to saved pictures.
HIDDEN = [io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt]
SEED_LIMIT = 0xFFFFFFFFFFFFFFFF


def schema(
    sockets: Sequence[io.Input] = (),
    widgets: Sequence[io.Input] = (),
    optional: Sequence[io.Input] = (),
    **about: Any,
) -> io.Schema:
    """An ``io.Schema``: sockets, main widgets, advanced widgets, optional inputs.

    Saved graphs store values of widgets by position; tests/nodes/schemas.json records the order.
    """
    widgets = sorted(widgets, key=lambda widget: bool(widget.advanced))
    return io.Schema(inputs=[*sockets, *widgets, *optional], **about)


def output(kind: Any, name: str, tooltip: str, **about: Any) -> io.Output:
    """An output of the class ``kind``."""
    return kind.Output(name, display_name=name, tooltip=tooltip, **about)


def widgets(settings: type, automatic: Collection[str] = ()) -> list[io.Input]:
    """One widget per setting; those named in ``automatic`` have the value auto, which is their default."""
    return [widget(name, default, about, name in automatic) for name, (default, about) in knobs(settings).items()]


def widget(name: str, default: Any, about: Knob, automatic: bool = False) -> io.Input:
    """The widget of a setting, with ``automatic`` also the value auto: -1 of a number, "auto" of a choice; see :func:`chosen`."""
    shared: dict[str, Any] = {"tooltip": about.tooltip, "advanced": about.advanced or None}
    if automatic:
        return _automatic_widget(name, default, about, shared)
    if about.choices:
        return io.Combo.Input(name, options=list(about.choices), default=default, **shared)
    if isinstance(default, bool):
        return io.Boolean.Input(name, default=default, **shared)
    if isinstance(default, int):
        low, high, step = (None if n is None else int(n) for n in (about.low, about.high, about.step))
        return io.Int.Input(name, default=default, min=low, max=high, step=step, **shared)
    return io.Float.Input(name, default=default, min=about.low, max=about.high, step=about.step, **shared)


def _automatic_widget(name: str, default: Any, about: Knob, shared: dict[str, Any]) -> io.Input:
    switch = isinstance(default, bool)
    if switch or about.choices:
        options = [AUTO, "on", "off"] if switch else [AUTO, *about.choices]
        shared["tooltip"] += f" {AUTO}: {_SOURCES}"
        return io.Combo.Input(name, options=options, default=AUTO, **shared)
    shared["tooltip"] += f" -1 is auto: {_SOURCES}"
    kind = io.Int if isinstance(default, int) else io.Float
    high, step = (n if n is None else type(default)(n) for n in (about.high, about.step))
    return kind.Input(name, default=type(default)(-1), min=type(default)(-1), max=high, step=step, **shared)


def chosen(settings: type, values: Mapping[str, Any], automatic: Collection[str]) -> dict[str, Any]:
    """The values of widgets that are not at auto; ``automatic`` names those that have that value."""
    known = knobs(settings)
    return {k: v for k, v in values.items() if k not in automatic or not _is_auto(v, known[k][1])}


def _is_auto(value: Any, about: Knob) -> bool:
    """Numbers from -1 up to the range are auto too: the editor's arrows pass through them."""
    if about.low is None:
        return value == AUTO
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1 <= value < max(0.0, about.low)


def automatic_names(settings: type) -> frozenset[str]:
    """Settings whose widgets have the value auto: those that a model's file or a preset may state."""
    return frozenset(knobs(settings)) & (presets.RECOMMENDED | presets.names(settings))


# Preset widget's choice to the preset.
PRESETS = {
    "balanced for this model": "balanced",
    "fast for this model": "fast",
    presets.EXACT: presets.EXACT,
    "none": presets.AS_SET,
}
_SOURCES = "the value of the preset, else of the model's file, else of the paper."


def preset_widget(tooltip: str) -> io.Input:
    """The preset widget; ``tooltip`` adds what the presets do."""
    return io.Combo.Input(
        "preset",
        options=list(PRESETS),
        default=next(iter(PRESETS)),
        tooltip="The values of all widgets at auto; a widget that is set takes precedence, except over exact. "
        f"{tooltip} none: what the model's file recommends. The report lists the values used.",
    )


def settings_of(
    kind: type[T],
    values: Mapping[str, Any],
    recommended: Mapping[str, Any],
    demo: bool,
    width: int = 0,
    ar_steps: int | None = None,
) -> T:
    """Settings of a run from a node's widgets, "preset" among them if there is one; other arguments as :func:`presets.combine`."""
    values = dict(values)
    choice = values.pop("preset", "none")
    if not isinstance(choice, str) or choice not in PRESETS:
        raise UserError(f"preset: {choice!r} is not one of {', '.join(PRESETS)}.")
    asked = chosen(kind, values, automatic_names(kind))
    if PRESETS[choice] == presets.EXACT:
        asked = {k: v for k, v in asked.items() if k not in presets.values(kind, presets.EXACT, demo, width)}
    return presets.combine(kind, recommended, PRESETS[choice], asked, demo, width, ar_steps)


def seed_widget() -> io.Input:
    """The seed widget, the same as KSampler's."""
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=SEED_LIMIT,
        control_after_generate=True,
        tooltip="Decides all randomness: token order and noise. With one seed, any difference between samplers comes from the "
        "method. Image i of a batch uses (seed, i), so it is the same picture as in a batch of its own.",
    )


def checked_seed(value: Any) -> int:
    """Check that a value is an integer from 0 to 2^64 - 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"seed: {value!r} is not a whole number.")
    if not 0 <= value <= SEED_LIMIT:
        raise UserError(f"seed: {value} is outside 0 to {SEED_LIMIT}.")
    return value


def checked_switch(value: Any, field: str) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, (bool, int)):
        raise UserError(f"{field}: {value!r} is neither true nor false.")
    return bool(value)


def expect(value: Any, kind: type[T], field: str, source: str) -> T:
    """Check the class of the input ``field``; ``source`` is the node whose output fits."""
    if not isinstance(value, kind):
        raise UserError(f"{field}: it got {describe(value)}; connect the output of {source}.")
    return value


def validity(check: Callable[..., Any], text: Any, field: str) -> bool | str:
    """The answer of ``validate_inputs`` about a typed text: True, or what is wrong without the field, which ComfyUI puts in front.

    It runs on the server's event loop. A text that arrives over a link is None; it is checked when the node runs.
    """
    try:
        if text is not None:
            check(str(text))
    except UserError as problem:
        return str(problem).removeprefix(f"{field}: ")
    return True


def expect_text(value: Any, field: str) -> str:
    """Check that a value is a text."""
    return expect(value, str, field, "a text node, or type it")


def expect_model(value: Any, holder: type[T], kind: type, field: str, source: str) -> T:
    """Check the family of a loaded model: ``holder`` with attribute ``model`` of class ``kind``."""
    loaded = expect(value, holder, field, source)
    expect(loaded.model, kind, field, source)  # type: ignore[attr-defined]
    return loaded


def expect_image(value: Any, field: str) -> Tensor:
    """Check an IMAGE: pictures [B, H, W, C], 1, 3 or 4 channels."""
    image = expect(value, torch.Tensor, field, "a node that gives an IMAGE, such as VAE Decode")
    if image.ndim != 4 or image.shape[3] not in (1, 3, 4) or 0 in image.shape:
        raise UserError(f"{field}: it got a tensor {list(image.shape)}; connect pictures [batch, height, width, 3].")
    return image


def expect_mask(value: Any, field: str) -> Tensor:
    """Check a MASK and return it as [B, H, W]; nodes make [H, W] and [B, 1, H, W] too."""
    mask = expect(value, torch.Tensor, field, "a node that gives a MASK")
    mask = mask[None] if mask.ndim == 2 else mask[:, 0] if mask.ndim == 4 else mask
    if mask.ndim != 3 or 0 in mask.shape:
        raise UserError(f"{field}: it has the shape {list(mask.shape)}; connect a MASK [batch, height, width].")
    return mask


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
