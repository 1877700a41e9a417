"""From settings to ComfyUI widgets, the socket types, and the checks of a node's inputs.

ComfyUI checks the range of typed numbers, but neither NaN nor values that arrive over a link. Every node therefore
checks its inputs again, with the ranges of the same knobs (``samplers/settings.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch
from comfy_api.v0_0_2 import io
from torch import Tensor

from ..errors import UserError
from ..networks.chat import MOST_TEXT
from ..runs.images import IMAGE_SOURCE, LATENT_SOURCE, MASK_SOURCE, image_tensor, latent_tensor, mask_tensor
from ..runs.limits import SEEDS, whole
from ..runs.registry import FAMILIES
from ..samplers.settings import Knob, Settings, default_or_full_size, knobs
from .sent import PRESETS, usual_numbers

T = TypeVar("T")

MAR = io.Custom("FASTAR_MAR")
TOKEN_MODEL = io.Custom("FASTAR_TOKEN_MODEL")
BLOCK_MODEL = io.Custom("FASTAR_BITDANCE")
TAR = io.Custom("FASTAR_TAR")
LATENT_SAMPLERS = io.Custom("FASTAR_LATENT_SAMPLERS")
ANY_MODEL = io.Custom(",".join(dict.fromkeys(family.socket for family in FAMILIES.values())))
# Each kind of condition has its own socket type, so the editor offers only samplers whose models can read that kind.
_OF_KIND = {
    "class": "FASTAR_LABELS",
    "prompt": "FASTAR_PROMPT",
    "image prompt": "FASTAR_IMAGE_PROMPT",
    "text": "FASTAR_TEXT",
    "codes": "FASTAR_CODES",
}
LABELS = io.Custom(_OF_KIND["class"])
PROMPT = io.Custom(_OF_KIND["prompt"])
IMAGE_PROMPT = io.Custom(_OF_KIND["image prompt"])
TEXT = io.Custom(_OF_KIND["text"])
CODES = io.Custom(_OF_KIND["codes"])
REPORT = io.Custom("FASTAR_REPORT")
CACHE = io.Custom("FASTAR_CACHE")
CROP = io.Custom("FASTAR_CROP")


def condition_input(kinds: Collection[str], tooltip: str) -> io.Input:
    """The condition socket of a sampler, for conditions of some kinds."""
    types = [_OF_KIND[kind] for kind in _OF_KIND if kind in kinds]
    return io.Custom(",".join(types)).Input("condition", tooltip=tooltip, lazy=True)


def models_of_decoders() -> dict[str, str]:
    """For each kind of decoder, the models, in words, whose latents the decoder decodes."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        found.setdefault(family.decoder, []).append(family.words)
    return {kind: ", or ".join(words) for kind, words in found.items()}


# The sockets of the nodes that run any sampler.
ANY_SOCKETS = [
    ANY_MODEL.Input("model", tooltip="The model to sample, from any loader except Load Tar."),
    condition_input(
        _OF_KIND,
        "What to generate: one label or prompt per image. Connect the condition that you would "
        "connect to a sampler of this model.",
    ),
]
ANY_DRAFT = ANY_MODEL.Input(
    "draft",
    optional=True,
    tooltip="A second, smaller model, which drafts tokens. Connect a draft model only for the samplers CSpD and "
    "MuLo-SD.",
)

# Hidden inputs of nodes that show text and write reports to saved images.
HIDDEN = [io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt]
SEED_LIMIT = SEEDS - 1


# Whether this version of ComfyUI can send a node's text again. With older versions, the editor keeps the old text.
_SENDS_TEXT_AGAIN = "has_intermediate_output" in {field.name for field in fields(io.Schema)}


def schema(
    sockets: Sequence[io.Input] = (),
    widgets: Sequence[io.Input] = (),
    optional: Sequence[io.Input] = (),
    **about: Any,
) -> io.Schema:
    """An ``io.Schema``, whose inputs are in this order: sockets, main widgets, advanced widgets, optional inputs.

    Saved graphs store the values of widgets by position; tests/nodes/schemas.json records the order. Widgets are
    optional, so a prompt that was saved before a widget was added still runs. Only two kinds of widgets are required:
    a sampler's seed and a loader's file. The editor shows required widgets first.
    """
    if _SENDS_TEXT_AGAIN:
        # When ComfyUI reuses the result of a run, it then sends the node's text about the run again.
        about["has_intermediate_output"] = io.Hidden.unique_id in about.get("hidden", ())

    return io.Schema(inputs=[*sockets, *sorted(widgets, key=_last), *optional], **about)


def _last(widget: Any) -> bool:
    """The sort key of a widget: whether it is advanced, so that advanced widgets come last."""
    return bool(widget.advanced)


# By name of an input that many nodes have: the text that a help page adds to the tooltip.
MORE_OF_MANY = {
    "allow_download": (
        "FastAR does not download files that are already in the Hugging Face cache. If you cancel a download, the "
        "next run resumes the download."
    ),
    "speed": (
        "On an NVIDIA GPU, *plain* takes two to eight times as long as *auto*. With *auto*, the first two runs of "
        "each image size and batch size are slower than later runs. If ComfyUI keeps weights in system memory, "
        "*auto* works like *plain*. Compilation needs Triton on a GPU, or a C++ compiler on a CPU."
    ),
    "weights": "With *auto*, the report says which weights FastAR has read.",
    "images": "Usual: 1 to 4.",
    "latent_image": (
        "*batch_size* of Empty Latent Image sets how many images are generated from a single label or prompt. VAE "
        "Encode scales any image to the size of the model's images. You can also connect the latent of another "
        "sampler. To inpaint only a part of a batch, use Rebatch Latents or Latent From Batch. *condition* describes "
        "the new content of the masked area."
    ),
}


RECOMMENDS = "*recommended* uses the values that the model's file recommends, or else the published values."


def explained(part: Any, more: str) -> Any:
    """Attach ``more`` to an input or output: the help page adds ``more`` to the tooltip; ComfyUI does not send it."""
    part.more = more
    return part


def output(kind: Any, name: str, tooltip: str, **about: Any) -> io.Output:
    """An output of the class ``kind``."""
    return kind.Output(name, display_name=name, tooltip=tooltip, **about)


def widgets(settings: type) -> list[io.Input]:
    """One widget per setting."""
    return [widget(name, default, about) for name, (default, about) in knobs(settings).items()]


def widget(name: str, default: Any, about: Knob, shown: Any = None) -> io.Input:
    """The widget of a setting. A new node shows the value ``shown``, or the default if ``shown`` is None."""
    return explained(_widget(name, default, about, shown), about.more)


def _widget(name: str, default: Any, about: Knob, shown: Any) -> io.Input:
    tooltip = f"{about.help} ({about.symbol} in the paper)" if about.symbol else about.help
    shared: dict[str, Any] = {"tooltip": tooltip, "advanced": about.advanced or None, "optional": True}

    default = default_or_full_size(default, about)
    shown = default if shown is None else shown
    if about.choices:
        return io.Combo.Input(name, options=list(about.choices), default=shown, **shared)

    if isinstance(default, bool):
        return io.Boolean.Input(name, default=shown, **shared)

    if isinstance(default, int):
        return io.Int.Input(
            name,
            default=shown,
            min=_whole(about.low),
            max=_whole(about.high),
            step=_whole(about.step),
            **shared,
        )

    return io.Float.Input(name, default=shown, min=about.low, max=about.high, step=about.step, **shared)


def _whole(limit: float | None) -> int | None:
    """The limit of a whole-number widget as an int; None if there is no limit."""
    return None if limit is None else int(limit)


def preset_widget(options: Sequence[str] = PRESETS) -> io.Input:
    """The preset widget.

    If the user chooses a preset, the editor fills in the numbers below it: see ``filling`` and web/js/presets.js. For
    graphs that a program sends, see ``sent``.
    """
    return io.Combo.Input(
        "preset",
        options=list(options),
        default=options[0],
        optional=True,
        tooltip="Sets several of the settings below to values for the connected model. If you change one of these "
        "settings, the preset becomes custom.",
    )


def setting_widgets(kind: type[Settings], options: Sequence[str] = PRESETS) -> list[io.Input]:
    """One optional widget per setting. A new node shows the values of the first preset of ``options`` for a full-size
    model.

    If a prompt leaves a widget out, the setting takes the preset's value for the connected model.
    """
    usual = usual_numbers(kind, options)

    made: list[io.Input] = []
    for name, (default, about) in knobs(kind).items():
        made.append(widget(name, default, about, shown=usual[name]))
    return made


def checked_preset(value: Any, options: Sequence[str] = PRESETS) -> str:
    """Check that a value is one of the options of a preset widget. ComfyUI does not check values that links bring."""
    if not isinstance(value, str) or value not in options:
        raise UserError(f"preset: it got {describe(value)}; choose one of {', '.join(options)}.")

    return value


SEED = 0


_SEED = (
    "Controls all randomness. With the same seed, all samplers of a model start from the same noise, so you can "
    "compare their images pixel by pixel."
)


def seed_widget(optional: bool = True, tooltip: str = _SEED, more: str = "") -> io.Input:
    """The seed widget. It is the same as KSampler's, except for what web/js/seeds.js changes.

    Args:
        optional: False only if the seed is the first widget of the node.
        tooltip, more: the texts for a node that generates no image, whose seed therefore controls something else.
    """
    widget = io.Int.Input(
        "seed",
        default=SEED,
        optional=optional,
        min=0,
        max=SEED_LIMIT,
        control_after_generate=True,
        tooltip=tooltip,
    )
    return explained(widget, more)


# Largest value of first_image. A cell of a sweep (lab/sweeps) has up to ten million images.
_MOST_NUMBERS = 10_000_000


def first_image_widget() -> io.Input:
    """The widget first_image: two images with the same seed but different positions have different noise."""
    return io.Int.Input(
        "first_image",
        default=0,
        min=0,
        max=_MOST_NUMBERS,
        optional=True,
        advanced=True,
        tooltip="Position in a batch, counted from 0. This run generates the images of a batch from this position on. "
        "Usual: 0; to generate only the fourth image of a batch again, set this to 3 and connect only the label or "
        "prompt of that image.",
    )


def checked_first_image(value: Any) -> int:
    """Check that a value is a possible value of first_image."""
    return whole(value, "first_image", 0, _MOST_NUMBERS)


def checked_seed(value: Any) -> int:
    """Check that a value is an integer from 0 to 2^64 - 1."""
    return whole(value, "seed", 0, SEED_LIMIT)


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
    """The answer of ``validate_inputs`` about a typed text: True, or what is wrong with the text.

    The answer does not name the field, because ComfyUI puts the name in front. ComfyUI calls ``validate_inputs`` on the
    server's event loop. For a text that arrives over a link, ``text`` is None; the node checks it when the node runs.
    """
    if text is None:
        return True

    try:
        check(str(text))
    except UserError as problem:
        return str(problem).removeprefix(f"{field}: ")
    return True


def expect_text(value: Any, field: str) -> str:
    """Check that a value is a text of at most ``MOST_TEXT`` characters."""
    text = expect(value, str, field, "a text node, or type the text")

    if len(text) > MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {MOST_TEXT}.")
    return text


def expect_image(value: Any, field: str) -> Tensor:
    """Check an IMAGE, see :func:`.image_tensor`."""
    return image_tensor(expect(value, Tensor, field, IMAGE_SOURCE), field)


def expect_mask(value: Any, field: str) -> Tensor:
    """Check a MASK, see :func:`.mask_tensor`."""
    return mask_tensor(expect(value, Tensor, field, MASK_SOURCE), field)


def expect_latents(value: Any, field: str) -> Tensor:
    """Check the tensor of a LATENT, see :func:`.latent_tensor`."""
    return latent_tensor(expect(value, Tensor, field, LATENT_SOURCE), field)


# Names for messages: how a message names a value on one of FastAR's sockets, by the kind of the value.
_KIND_SEEN_AS: dict[str, str] = {
    "class": "class labels",
    "label text": "class labels",
    "prompt": "a prompt",
    "image prompt": "an image with a prompt",
    "text": "a text of LlamaGen Prompt",
    "codes": "semantic codes",
    "features": "semantic features",
    "report": "a report",
    "cache": "the settings of LazyMAR Cache",
    "crop": "a crop of Crop around Mask",
}
# Names for messages of other values, by class: classes of FastAR and ComfyUI, and classes that other nodes output.
_SEEN_AS: dict[str, str] = {
    # FastAR's models that belong to no family, and FastAR's VAE.
    "TarModel": "the language model of Tar",
    "TATokModel": "a TA-Tok",
    "LatentSamplersModel": "latent samplers",
    "FastARVAE": "a VAE",
    # Classes of ComfyUI.
    "VAE": "a VAE",
    "CLIP": "a CLIP",
    "ModelPatcher": "a MODEL of another kind",
    "ModelPatcherDynamic": "a MODEL of another kind",
    "ControlNet": "a CONTROL_NET",
    "ImageModelDescriptor": "an UPSCALE_MODEL",
    "list": "a list",
    "tuple": "a list",
    "dict": "a dictionary",
    "bytes": "raw bytes",
}
# For a value of any other class, :func:`describe` writes this text before the name of the class.
STRANGE = "an object of the class"
# Largest number of characters of a text or a name that a message shows.
_LONGEST = 60


def _seen_as(value: Any) -> str | None:
    """The name for messages of a model of a family, or of a value of a known class; None for any other value."""
    name = getattr(value, "family", None)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    return _SEEN_AS.get(type(value).__name__) if family is None else family.words


def describe(value: Any) -> str:
    """A short description of a value for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {value[:_LONGEST]!r}"

    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write very long integers
        return "a number of more than 64 bits"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"

    if isinstance(value, dict) and "samples" in value:
        return "a LATENT"
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"

    # A core CONDITIONING is a list of pairs.
    if isinstance(value, list) and value and isinstance(value[0], (list, tuple)):
        return "a CONDITIONING"

    stated = getattr(value, "kind", None)
    kind = _KIND_SEEN_AS.get(stated) if isinstance(stated, str) else None
    kind = kind or _seen_as(value)
    if kind is not None:
        return kind

    # If the value is a loaded model, describe the model by its kind and name.
    model = getattr(value, "model", None)
    kind = _seen_as(model)
    if model is None or kind is None:
        return f"{STRANGE} {type(value).__name__[:_LONGEST]}"

    name = getattr(model, "name", "")
    return f"{kind} ({name[:_LONGEST]})" if isinstance(name, str) and name else kind
