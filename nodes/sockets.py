"""Values on the sockets of this pack, recognised by what they carry. docs/sockets.md describes them for other packs.

Every value says its ``kind`` and, as ``fastar_version``, the version of its description. Its class may come
from another copy of this pack, or from another pack. :data:`VALUES` is the description: the checks here compare values
with it, the page shows it, and tests/nodes/sockets.json records it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import OfFastAR, UserError, amount, printable
from ..networks.chat import MOST_TEXT
from ..networks.precision import is_finite
from ..reports.record import EXPANDED
from ..runs.labels import split_labels
from ..runs.registry import FAMILIES
from ..samplers.conditioning import (
    USUAL_FREEDOM,
    AnyCondition,
    ClassCondition,
    CodeCondition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
)
from ..samplers.tokens.settings import LARGEST_FREEDOM
from .schema import SEED_LIMIT, STRANGE, describe
from .sent import PRESETS

T = TypeVar("T")

# Images of a label or prompt that a node makes a condition for.
MOST_IMAGES = 256
# The remedy where a value is not as the page says.
_ASK = "report this to the author of the node that made this object"


@dataclass(frozen=True)
class LabelText(OfFastAR):
    """Labels, ``repeat`` images of each, whose label set is the one of the model that samples them."""

    kind: ClassVar[str] = "label text"
    fastar_version: ClassVar[int] = 1
    text: str
    repeat: int

    def __str__(self) -> str:
        """For people: what ComfyUI's Preview as Text shows."""
        return (
            f"Class labels, {amount(self.repeat, 'images')} of each: {printable(', '.join(split_labels(self.text)))}."
        )


# ------------------------------------------------------------------------------------------------ what attributes hold


@dataclass(frozen=True)
class Form:
    """What an attribute holds: in words, one of it and several, and whether a value is one."""

    one: str
    several: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _span(low: float, high: float) -> str:
    """A range in words, in which the limit of 64 bits goes without saying."""
    return f"from {low:g}" if high == SEED_LIMIT else f"from {low:g} to {high:g}"


def _whole(low: int, high: int = SEED_LIMIT) -> Form:
    """Whole numbers of a range."""
    span = _span(low, high)
    return Form(
        f"a whole number {span}", f"whole numbers {span}", lambda value: _is_whole(value) and low <= value <= high
    )


def _number(low: float, high: float = SEED_LIMIT) -> Form:
    """Numbers of a range; NaN is in none."""
    span = _span(low, high)

    def fits(value: Any) -> bool:
        return (isinstance(value, float) or _is_whole(value)) and low <= value <= high

    return Form(f"a number {span}", f"numbers {span}", fits)


def _choice(*texts: str) -> Form:
    """One of a few texts."""
    listed = ", ".join(texts)
    return Form(f"one of {listed}", f"of {listed}", lambda value: isinstance(value, str) and value in texts)


def _or_none(form: Form) -> Form:
    """A form, or None."""
    return Form(f"{form.one}, or None", form.several, lambda value: value is None or form.fits(value))


def _list(form: Form) -> Form:
    """A list or tuple of a form."""

    def fits(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(map(form.fits, value))

    return Form(f"a list of {form.several}", f"lists of {form.several}", fits)


def _by_name(form: Form) -> Form:
    """A dictionary from texts to a form."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(k, str) and form.fits(v) for k, v in value.items())

    return Form(f"a dictionary of {form.several} by name", f"dictionaries of {form.several}", fits)


def _tensor(dtype: str, shape: str, dtypes: Sequence[torch.dtype], shaped: Callable[[Tensor], bool]) -> Form:
    """Dense tensors with data, whose numbers are finite. ``shaped``: whether one has the shape."""

    def fits(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_meta:
            return False
        if value.dtype not in dtypes or not shaped(value):
            return False
        return not value.is_floating_point() or is_finite(value)

    return Form(f"a tensor {dtype} {shape}", f"tensors {dtype} {shape}", fits)


def _is_setting(value: Any) -> bool:
    """Whether JSON can hold it and a report can show it."""
    if isinstance(value, (int, float)):
        return abs(value) <= SEED_LIMIT
    return value is None or isinstance(value, str)


_TEXT = Form("a text", "texts", lambda value: isinstance(value, str))
_NAME = Form("a text that is not empty", "texts", lambda value: isinstance(value, str) and value != "")
_PROMPT = Form(
    f"a text of at most {MOST_TEXT} characters",
    f"texts of at most {MOST_TEXT} characters",
    lambda value: isinstance(value, str) and len(value) <= MOST_TEXT,
)
_SWITCH = Form("true or false", "switches", lambda value: isinstance(value, bool))
_SETTINGS = _by_name(Form("a setting", "numbers, texts, switches or None", _is_setting))
_VAE = Form("a VAE", "VAEs", lambda value: hasattr(value, "first_stage_model"))
_PIXELS = _tensor(
    "uint8",
    "[height, width, 3]",
    [torch.uint8],
    lambda tensor: tensor.ndim == 3 and tensor.shape[2] == 3 and 0 not in tensor.shape,
)
_CODES = _tensor("int64", "[codes]", [torch.int64, torch.int32, torch.int16], lambda tensor: tensor.ndim == 1)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROWS = _tensor("of finite floats", "[rows, width]", _FLOATS, lambda tensor: tensor.ndim == 2)

# Least and largest value of maps, which number AR steps, islands or waves unless they are named here.
_MOST_MAPPED = 1 << 20
_IN_MAPS = {"outcome": (0, EXPANDED), "cached": (0, _MOST_MAPPED), "islands": (0, _MOST_MAPPED)}


def _are_maps(value: Any) -> bool:
    """Whether it is a dictionary of maps in their ranges."""
    if not isinstance(value, Mapping):
        return False

    for name, found in value.items():
        low, high = _IN_MAPS.get(name, (-1, _MOST_MAPPED))
        if not isinstance(found, np.ndarray) or found.ndim != 3 or 0 in found.shape or found.dtype.kind not in "iu":
            return False
        if int(found.min()) < low or int(found.max()) > high:
            return False
    return True


_MAPS = Form("a dictionary of arrays int32 [images, rows, columns] by name", "dictionaries of arrays", _are_maps)
_GRID = Form(
    "a list of two whole numbers from 1, or an empty one",
    "grids",
    lambda value: _list(_whole(1)).fits(value) and len(value) in (0, 2),
)

# ------------------------------------------------------------------------------------------------ the description


@dataclass(frozen=True)
class Attribute:
    """An attribute of a value."""

    name: str  # "model.name" is the name of the attribute model
    form: Form
    about: str = ""  # of the page
    needed: bool = True  # False: it may be left out
    per_image: bool = False  # a list with an entry for each image


@dataclass(frozen=True)
class Kind:
    """The values of a kind."""

    sockets: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    about: str = ""  # of the page
    own: str = ""  # name of the class, in any copy of this pack, of values that no other pack can make
    # Rises if an attribute leaves, holds something else or is needed from now on.
    version: int = 1


_NAMES = Attribute("names", _list(_TEXT), "captions", per_image=True)
_TEXTS = Attribute("texts", _list(_PROMPT), "prompts", per_image=True)

VALUES: dict[str, Kind] = {
    ClassCondition.kind: Kind(
        ("FASTAR_LABELS",),
        (
            Attribute("labels", _list(_whole(0)), "class ids", per_image=True),
            _NAMES,
            Attribute(
                "label_set",
                _TEXT,
                "the list of the class ids, *picture-book* or *imagenet-1k*; if it is left out, any model accepts the "
                "ids",
                needed=False,
            ),
        ),
        "for models of classes",
    ),
    LabelText.kind: Kind(
        ("FASTAR_LABELS",),
        (
            Attribute("text", _PROMPT, "names or ids as typed in Class Label; the sampled model has the label set"),
            Attribute("repeat", _whole(1, MOST_IMAGES), "images of each label"),
        ),
        "for models of classes",
    ),
    PromptCondition.kind: Kind(
        ("FASTAR_PROMPT",),
        (
            _TEXTS,
            Attribute(
                "unconditional",
                _PROMPT,
                "the text from which guidance moves the image away, for Harmon, UniPic and NextStep; if it is left "
                "out, the model's usual text",
                needed=False,
            ),
        ),
        "for Harmon, UniPic, Janus, BitDance and NextStep",
    ),
    ImagePromptCondition.kind: Kind(
        ("FASTAR_IMAGE_PROMPT",),
        (
            _TEXTS,
            Attribute("images", _list(_PIXELS), "what the prompts change", per_image=True),
            Attribute(
                "freedom",
                _number(0, LARGEST_FREEDOM),
                f"w of Janus-4o's guidance; without it {USUAL_FREEDOM:g}",
                needed=False,
            ),
        ),
        "for Janus-4o and NextStep-1-Large-Edit",
    ),
    TextCondition.kind: Kind(
        ("FASTAR_TEXT",),
        (Attribute("features", _list(_ROWS), "what Flan-T5-XL makes of the prompts", per_image=True), _NAMES),
        "for text-to-image models of LlamaGen",
    ),
    CodeCondition.kind: Kind(
        ("FASTAR_CODES",),
        (
            Attribute("codes", _list(_CODES), "semantic codes of TA-Tok", per_image=True),
            _NAMES,
            Attribute("size", _whole(0), "entries of TA-Tok's codebook; without it 0, unknown", needed=False),
        ),
        "for Tar's de-tokenizers",
    ),
    FeatureCondition.kind: Kind(
        ("FASTAR_CODES",),
        (Attribute("features", _list(_ROWS), "what TA-Tok makes of the codes", per_image=True), _NAMES),
        "for Tar's de-tokenizers",
    ),
    "model": Kind(
        (*dict.fromkeys(family.socket for family in FAMILIES.values()), "FASTAR_TAR", "FASTAR_LATENT_SAMPLERS"),
        (
            Attribute("model.name", _TEXT, "its name in messages and reports"),
            Attribute(
                "model.family",
                _TEXT,
                f"{', '.join(f'*{family}*' for family in FAMILIES)}, *language* or *latent samplers*",
            ),
            Attribute(
                "model.condition",
                _TEXT,
                "the kind of condition that it reads; models that generate no images have none",
                needed=False,
            ),
            Attribute(
                "model.label_set",
                _TEXT,
                "the list of its classes; models that generate no images have none",
                needed=False,
            ),
            Attribute("vae", _or_none(_VAE), "the VAE of the same loader", needed=False),
            Attribute("recommended", _SETTINGS, "settings of its file", needed=False),
        ),
        "from a loader of FastAR",
        own="Loaded",
    ),
    "report": Kind(
        ("FASTAR_REPORT",),
        (
            Attribute("sampler", _NAME, "its name on the command line"),
            Attribute("model", _NAME, "the model's name"),
            Attribute("settings", _SETTINGS, "settings of the sampler"),
            Attribute("seed", _or_none(_whole(0, SEED_LIMIT)), "None if the noise does not come from a seed"),
            Attribute("images", _whole(1), "images of the batch"),
            Attribute("device", _TEXT, "*cpu* or *cuda*, for example"),
            Attribute("seconds", _number(0), "seconds of the batch without the decoder", needed=False),
            Attribute("phases", _by_name(_number(0)), "seconds of parts of the work", needed=False),
            Attribute("counts", _by_name(_whole(0)), "work of the batch", needed=False),
            Attribute("acceptance", _or_none(_number(0, 1)), "accepted drafts per verified draft", needed=False),
            Attribute("dtype", _TEXT, "of the weights", needed=False),
            Attribute("grid", _GRID, "tokens along the height and the width; empty where it is unknown", needed=False),
            Attribute("maps", _MAPS, "what happened to every token, such as *step*", needed=False),
        ),
        "names as in [report.md](report.md); `str(report)` is a text",
    ),
    "cache": Kind(
        ("FASTAR_CACHE",),
        (
            Attribute("preset", _choice(*PRESETS), "the preset for the settings that `values` leaves out"),
            Attribute("values", _SETTINGS, "settings of LazyMAR Cache"),
        ),
        "for the MAR samplers",
    ),
    "crop": Kind(("FASTAR_CROP",), about="from Crop around Mask", own="Cropped"),
}


# ------------------------------------------------------------------------------------------------ checks of inputs


def kind_on(value: Any) -> str:
    """The kind that a value states; "" if it is not a value of this pack's sockets."""
    kind = getattr(value, "kind", None)
    version: Any = getattr(value, "fastar_version", None)
    return kind if isinstance(kind, str) and _is_whole(version) and version >= 1 else ""


def expect_kind_on(value: Any, kinds: tuple[str, ...], field: str, source: str) -> Any:
    """Check that the value of the input ``field`` states one of the kinds, and has the attributes of that kind as
    :data:`VALUES` describes them; ``source`` is the node whose output fits.

    Raises:
        UserError: another value, or one that a newer version describes.
    """
    kind = kind_on(value)
    stated = getattr(value, "kind", None)
    if not kind and isinstance(stated, str) and stated in VALUES:
        raise UserError(
            f"{field}: this object says that it is a FastAR {stated}, but its attribute 'fastar_version' is not a "
            f"whole number of 1 or more; {_ASK}."
        )
    if kind not in kinds:
        got = describe(value)
        if got.startswith(STRANGE) and not kind:
            got = f"{got}, which has no attribute fastar_version"
        raise UserError(f"{field}: it got {got}; connect the output of {source}.")

    known = VALUES[kind].version
    if value.fastar_version > known:
        raise UserError(
            f"{field}: this FastAR {kind} comes from a newer version of FastAR. Its fastar_version is "
            f"{value.fastar_version}, but the installed FastAR reads only versions up to {known}; update FastAR."
        )

    own = VALUES[kind].own
    if own and own not in (cls.__name__ for cls in type(value).__mro__):
        raise UserError(
            f"{field}: this object says that it is a FastAR {kind}, but no FastAR node made it; connect "
            f"the output of {source}."
        )

    for attribute in VALUES[kind].attributes:
        _expect_attribute(value, attribute, field)
    _expect_one_length(value, field)
    return value


def _expect_attribute(value: Any, attribute: Attribute, field: str) -> None:
    """Check that a value has an attribute, in its form."""
    try:
        held = attrgetter(attribute.name)(value)
    except AttributeError:
        if not attribute.needed:
            return
        raise UserError(
            f"{field}: this FastAR {value.kind} lacks the attribute {attribute.name!r}, which must be "
            f"{attribute.form.one}; {_ASK}."
        ) from None

    if not attribute.form.fits(held):
        raise UserError(
            f"{field}: the attribute {attribute.name!r} must be {attribute.form.one}, but is {describe(held)}; {_ASK}."
        )


def _expect_one_length(value: Any, field: str) -> None:
    """Check that the lists of a condition have an entry for each image, and that a report's maps are of its images."""
    lists = [attribute.name for attribute in VALUES[value.kind].attributes if attribute.per_image]
    for name in lists:
        images, entries = len(getattr(value, lists[0])), len(getattr(value, name))
        if images < 1:
            raise UserError(
                f"{field}: the attribute {name!r} is an empty list, but must have an entry for each image; {_ASK}."
            )
        if entries != images:
            raise UserError(
                f"{field}: the attribute {name!r} must have an entry for each of {amount(images, 'images')}, but has "
                f"{entries}; {_ASK}."
            )

    if value.kind == "report":
        for name, found in getattr(value, "maps", {}).items():
            if len(found) != value.images:
                raise UserError(
                    f"{field}: the map {name[:60]!r} must cover {amount(value.images, 'images')}, but covers "
                    f"{len(found)}; {_ASK}."
                )


def expect_own(value: Any, cls: type[T], field: str, source: str) -> T:
    """As :func:`expect_kind_on` for the kind of a dataclass of ours; a value of another class becomes one of it, with
    tuples for its lists.
    """
    expect_kind_on(value, (cls.kind,), field, source)  # type: ignore[attr-defined]
    if isinstance(value, cls) and not any(isinstance(held, list) for held in vars(value).values()):
        return value

    own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    carried: dict[str, Any] = {}
    for attribute in VALUES[value.kind].attributes:
        name = attribute.name
        if name in own and hasattr(value, name):
            held = getattr(value, name)
            carried[name] = tuple(held) if isinstance(held, list) else held
    return cls(**carried)


_CONDITIONS: tuple[type[AnyCondition], ...] = (
    ClassCondition,
    PromptCondition,
    ImagePromptCondition,
    TextCondition,
    FeatureCondition,
    CodeCondition,
)


def expect_condition(value: Any, source: str) -> AnyCondition | LabelText:
    """Check the value of a condition socket, and return it as an instance of our classes.

    Raises:
        UserError: another value, or one whose attributes are not what docs/sockets.md says.
    """
    classes = {cls.kind: cls for cls in (LabelText, *_CONDITIONS)}
    expect_kind_on(value, tuple(classes), "condition", source)
    return cast(Any, expect_own(value, classes[value.kind], "condition", source))
