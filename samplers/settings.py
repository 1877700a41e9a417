"""Settings of the samplers: frozen dataclasses. FastAR makes the nodes' widgets, the options of the command line and
the range checks from the fields of these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..errors import UserError, unknown
from ..reports.record import Report


@dataclass(frozen=True)
class Knob:
    """Metadata of one setting."""

    # The tooltip, mostly of two sentences. The first says what the setting does, and what a higher or lower value does.
    # The last says the usual value, and the value that switches the method off or makes the method exact.
    help: str
    # The lowest and the highest allowed value, and the step of the widget; None for choices and switches.
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()  # allowed strings, or empty
    # Only for a setting whose default is None: the usual value for a full-size model. It has three uses. A new node
    # shows this value in its widget. The type of this value is the type of the setting. And it is the last of the
    # values that can replace None, see filled_in.
    full_size_value: float | None = None
    same_as: str = ""  # the name of the setting whose value replaces None, or ""
    symbol: str = ""  # the paper's symbol for the setting if it differs from the name, or ""
    unit: str = ""  # unit of the value, or ""
    advanced: bool = False  # whether the node hides the setting among its advanced widgets
    # What else a user needs to know to choose a value, in Markdown, or "". The help page shows it after ``help``.
    more: str = ""


class Removed(NamedTuple):
    """A setting that FastAR removed."""

    value: Any  # the value that FastAR now always uses; None: the model decides
    instead: str = ""  # a text that says what replaces the setting, or ""


class Settings:
    """Base class of all settings. A derived class is a frozen dataclass, and :func:`knob` makes its fields. Every new
    object checks its values, and converts each number to the type of its setting.

    Raises:
        UserError: a value of a wrong type, a number that is not finite or outside its range, or an unknown choice.
    """

    # Keys: settings of other samplers that a user may try here. Values: why this class lacks a setting, and what to do.
    refused: ClassVar[Mapping[str, str]] = {}
    # Settings that FastAR removed from this class (not from its base classes), see check_removed.
    removed: ClassVar[Mapping[str, Removed]] = {}

    def __post_init__(self) -> None:
        for name, (default, metadata) in knobs(self).items():
            value = _checked(name, getattr(self, name), default, metadata)
            object.__setattr__(self, name, value)


class Guarantees(Settings):
    """Settings of a sampler, and what they promise about its images. There are three cases, in comparison with the
    images of the unaccelerated sampler:

    - :meth:`exact`: the images are identical;
    - :meth:`lossless`: the images differ, but they have the same distribution;
    - neither: the images differ, and they have a different distribution.
    """

    # Only for the third case: True if the image is a different image of the same subject, because the method decides
    # tokens in a different order or starts from a small image; False if the image approximates the unaccelerated image.
    different_image: ClassVar[bool] = False

    def exact(self, side: int) -> bool:
        """Whether the images are identical to the unaccelerated sampler's images, up to rounding in fp32. ``side``:
        number of tokens along a side of the grid.
        """
        return True

    def lossless(self) -> bool:
        """Whether the images differ from the unaccelerated sampler's images, but have exactly the same distribution."""
        return False

    def no_gain(self, report: Report) -> str:
        """Which part of the method did not make the run faster, and why, in a sentence; "" if there is no such part."""
        return ""

    def streams(self) -> dict[str, int]:
        """The streams of diffusion noise (``noise.py``): the name of each stream, and the number of diffusion steps for
        which the stream has noise. Two diffusions that need different noise read two streams with different names.
        """
        return {}


class HeadGuarantees(Guarantees):
    """The guarantees of samplers with a diffusion head, which combine several accelerations.

    To add an acceleration, write a base class that overrides ``approximates`` (or ``samples_differently``, in the same
    way)::

        return <own condition> or super().approximates

    ``super()`` asks the other base classes of the sampler's settings. So a property is True if it is True for any
    acceleration. If both properties are False, the sampler is exact. If only ``samples_differently`` is True, the
    sampler is lossless.
    """

    @property
    def approximates(self) -> bool:
        """Whether some acceleration, such as a cache, changes the distribution of the images."""
        return False

    @property
    def samples_differently(self) -> bool:
        """Whether some acceleration, such as speculation, samples different images from the same distribution."""
        return False

    def exact(self, side: int) -> bool:
        return not (self.approximates or self.samples_differently)

    def lossless(self) -> bool:
        return self.samples_differently and not self.approximates


def knob(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field for a setting. ``help`` and ``metadata`` become the fields of the setting's :class:`Knob`."""
    return field(default=default, metadata={"knob": Knob(help, **metadata)})


def speculation_knob(usual: str, more: str, head: str = "diffusion head") -> Any:
    """The setting *speculation* (``speculation.py``).

    Args:
        usual: the usual value, in words.
        more: what the help page adds to the tooltip.
        head: what the tooltip calls the head.
    """
    return knob(
        0,
        f"Draft this many diffusion steps at once and verify them in one call of the {head}. The image differs from "
        "the image without drafts, but drafts do not change the distribution from which images are sampled. Usual: "
        f"{usual}.",
        low=0,
        high=64,
        step=1,
        symbol="L",
        advanced=True,
        more=more,
    )


def knobs(settings: type | object) -> dict[str, tuple[Any, Knob]]:
    """The default and the :class:`Knob` of each setting, by name, in the order of the fields."""
    return {f.name: (f.default, f.metadata["knob"]) for f in fields(settings)}  # type: ignore[arg-type]


def default_or_full_size(default: Any, metadata: Knob) -> Any:
    """The default of a setting, or ``full_size_value`` of its :class:`Knob` if the default is None. The result is an
    example of the setting's type, and the value that a new node shows.
    """
    return metadata.full_size_value if default is None else default


def filled_in(settings: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name. A value that is None is replaced by the first of these values that exists: the value of the
    setting that ``same_as`` names, the model's ``own`` value, ``full_size_value``; see :class:`Knob`.
    """
    values: dict[str, Any] = {}
    for name, (_, metadata) in knobs(settings).items():
        value = getattr(settings, name)
        if value is None and metadata.same_as:
            value = getattr(settings, metadata.same_as)
        if value is None:
            value = own.get(name, metadata.full_size_value)
        values[name] = value

    return values


def in_words(kind: type, values: Mapping[str, Any]) -> str:
    """Values of settings in words, such as "32 AR steps, cfg 2.5". The text omits every advanced setting with its
    default value.
    """
    words = []
    for name, (default, metadata) in knobs(kind).items():
        value = values.get(name)
        if value is None:
            continue  # the model's own value applies

        if not metadata.advanced or value != default:
            words.append(setting_in_words(name, value))

    return ", ".join(words)


def setting_in_words(name: str, value: Any) -> str:
    """One setting and its value in words, such as "32 AR steps" or "cfg 2.5"."""
    words = "AR steps" if name == "steps" else name.replace("_", " ")
    if words.endswith(" steps"):
        return f"{shown(value)} {words}"
    return f"{words} {shown(value)}"


def shown(value: Any) -> str:
    """A value as text. A float gets at most three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


AnySettings = TypeVar("AnySettings", bound=Settings)


def settings_from(kind: type[AnySettings], values: Mapping[str, Any]) -> AnySettings:
    """Settings of the class ``kind`` from values by name. A number or a switch may also be given as text, as on a
    command line.

    Raises:
        UserError: a name is unknown; a removed setting has a value that :func:`check_removed` rejects; or
            :class:`Settings` does not allow a value.
    """
    known = knobs(kind)
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if check_removed(kind, name, value):
            continue
        if name not in known:
            raise unknown_setting_error(kind, name)

        example = default_or_full_size(*known[name])  # a value of the setting's type
        parsed[name] = _parsed(value, example)

    return kind(**parsed)


def removed_from(kind: type[Settings]) -> dict[str, Removed]:
    """The settings that FastAR removed from ``kind`` and its base classes, by name."""
    found: dict[str, Removed] = {}
    for base in reversed(kind.__mro__):
        found |= vars(base).get("removed", {})
    return found


def check_removed(kind: type[Settings], name: str, value: Any) -> bool:
    """Check the value of a setting that FastAR removed: it must be the value that FastAR now always uses. Saved
    workflows and scripts may still name a removed setting.

    Returns:
        Whether FastAR removed the setting ``name`` from ``kind``. If FastAR did not, ``value`` is not checked.

    Raises:
        UserError: FastAR removed the setting, and ``value`` is not the value that FastAR now always uses.
    """
    removed = removed_from(kind)
    if name not in removed:
        return False

    fixed, instead = removed[name]
    if _parsed(value, fixed) != fixed:
        consequence = "lets the model decide" if fixed is None else f"always uses {shown(fixed)}"
        if instead:
            consequence = f"{consequence}: {instead}"
        raise UserError(
            f"{name}: {value!r} is not possible, because FastAR removed this setting and {consequence}; leave {name} "
            "out."
        )
    return True


def unknown_setting_error(kind: type[Settings], name: str, problem: str = "no such setting") -> UserError:
    """The error for a name that is not a setting of ``kind``. If ``kind`` refuses the name, the error gives the reason.
    Otherwise, it states the ``problem``, see :func:`.errors.unknown`.
    """
    reason = kind.refused.get(name)
    if reason is not None:
        return UserError(f"{name}: {reason}.")

    return unknown(name, problem, name, knobs(kind))


# Words of a switch on a command line.
_ON = ("true", "yes", "on", "1")
_OFF = ("false", "no", "off", "0")


def _parsed(value: Any, example: Any) -> Any:
    """The bool or number that ``value`` stands for, or ``value`` unchanged if it stands for neither.

    ``example``: any value of the setting's type, which decides whether a bool or a number is expected.
    """
    if isinstance(example, bool):
        word = str(value).lower()
        if word in _ON:
            return True
        if word in _OFF:
            return False
    elif isinstance(value, str) and not isinstance(example, str):
        with suppress(ValueError):
            return float(value)
    return value


def _checked(name: str, value: Any, default: Any, metadata: Knob) -> Any:
    """The value of one setting, converted to the type of the setting. Raises UserError, see :class:`Settings`."""
    if value is None and metadata.full_size_value is not None:
        return None  # the model's own value will apply

    example = default_or_full_size(default, metadata)  # a value of the setting's type
    if metadata.choices:
        if not isinstance(value, str) or value not in metadata.choices:
            raise UserError(f"{name}: {value!r} is not one of {', '.join(metadata.choices)}.")
        return value

    if isinstance(example, bool):
        if not isinstance(value, bool):
            raise UserError(f"{name}: {value!r} is neither true nor false.")
        return value

    if not isinstance(value, Real) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not a number.")
    try:
        number = float(value)
    except OverflowError:  # a whole number with more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{name}: {value!r} is not a finite number.")

    if isinstance(example, int):
        if number != int(number):
            raise UserError(f"{name}: {value!r} is not a whole number.")
        number = int(number)

    low = metadata.low
    high = metadata.high
    if (low is not None and number < low) or (high is not None and number > high):
        in_digits = f"{number:g}"  # at most six digits
        if float(in_digits) != number:
            in_digits = repr(number)
        raise UserError(f"{name}: {in_digits} is outside {low:g} to {high:g}.")

    return number
