"""A sampler with its settings as one line of text: "fasthybrid: preset=fast, threshold=0.9"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import UserError
from ..samplers.mar.settings import SAFE_FIRST_TIMESTEP, MARBase
from ..samplers.settings import Settings, knobs, settings_from
from . import presets
from .labels import DEMO_LABELS
from .registry import FAMILIES, Entry, family_of, find

S = TypeVar("S", bound=Settings)

PRESET = "preset"
_MOST_TEXT = 8192
_MOST_NAME = 200


@dataclass(frozen=True)
class ModelFacts:
    """What the settings of a run depend on, of its model. The defaults describe an unknown full-size model."""

    demo: bool = False  # whether presets take the demo's values
    width: int = 0  # of a MAR's transformer, 0 where unknown
    recommended: Mapping[str, Any] = field(default_factory=dict)  # settings of the model's file
    model: Any = None  # the model, which may be without weights; None where it is not known

    @staticmethod
    def of(model: Any, recommended: Mapping[str, Any]) -> ModelFacts:
        """Those of a model, or of Tar's language model, which draws no images."""
        if model.family not in FAMILIES:
            return ModelFacts(recommended=recommended, model=model)

        demo = model.label_set == DEMO_LABELS
        return ModelFacts(demo, family_of(model).width(model), recommended, model)

    def settings(self, kind: type[S], preset: str, values: Mapping[str, Any], steps: int | None = None) -> S:
        """Settings of class ``kind`` from all sources; a later one takes precedence: defaults, the model's file, the
        preset, the user.

        Args:
            preset: one of :func:`.presets.names`.
            values: by the user, name by name.
            steps: of the run, for settings that do not hold it.

        Raises:
            UserError: no such preset, or a value out of range.
        """
        # Before what the file recommends, so that the message names the user's setting.
        settings_from(kind, values)

        suited = {k: v for k, v in self.recommended.items() if k in knobs(kind)}
        try:
            settings_from(kind, suited)
        except UserError as e:
            raise UserError(
                f"model: the model's file recommends a setting that is not possible ({str(e).rstrip('.')}); correct "
                "the file's metadata, or choose a different file."
            ) from e

        def settings(steps: int) -> S:
            chosen = presets.values(kind, preset, self.demo, self.width, steps)
            if preset == presets.BALANCED and "window" in suited:
                chosen["window"] = suited["window"]  # measured on the model's own grid
            return settings_from(kind, {**suited, **chosen, **values})

        # A preset may set the AR steps, on which its other values depend.
        usual = vars(settings_from(kind, {**suited, **values})).get("steps", steps or 64)
        return settings(vars(settings(usual)).get("steps", usual))

    def own_values(self, settings: Any) -> dict[str, Any]:
        """The model's own values of settings that are None, by name."""
        if self.model is None:
            limits = isinstance(settings, MARBase) and settings.limits_first_timestep
            return {"t_max": SAFE_FIRST_TIMESTEP} if limits else {}
        if self.model.family not in FAMILIES:
            return {"repetition_penalty": self.model.repetition_penalty}
        return family_of(self.model).own_values(self.model, settings)


@dataclass(frozen=True)
class Choice:
    """A sampler, a preset and the settings that are not left to the preset, the model's file or the default."""

    entry: Entry  # the sampler
    preset: str = presets.CUSTOM  # one of .presets.names
    values: Mapping[str, Any] = field(default_factory=dict)  # setting name to value, as text or of its type

    def settings(self, model: ModelFacts) -> Any:
        """The settings for a model."""
        return model.settings(self.entry.settings, self.preset, self.values)

    @property
    def text(self) -> str:
        """The line of text."""
        preset = {} if self.preset == presets.CUSTOM else {PRESET: self.preset}
        named = ", ".join(f"{name}={value}" for name, value in {**preset, **self.values}.items())
        return f"{self.entry.name}: {named}" if named else self.entry.name


def choose(sampler: str, values: Mapping[str, Any]) -> Choice:
    """The choice of a sampler's name and its settings, the preset among them as "preset".

    Raises:
        UserError: an unknown sampler, setting or preset, or a value out of range.
    """
    entry = find(sampler)

    values = dict(values)
    preset = str(values.pop(PRESET, presets.CUSTOM))
    presets.values(entry.settings, preset, demo=True)  # checks the name
    settings_from(entry.settings, values)
    return Choice(entry, preset, values)


def assignment(text: str, field: str) -> tuple[str, str]:
    """Name and value of "name=value"."""
    name, equals, value = (part.strip() for part in text.partition("="))

    if not equals or not name or name.endswith(".") or not value:
        raise UserError(f"{field}: {text[:60]!r} is not of the form name=value or sampler.name=value.")
    return name, value


def parse_settings(text: str, field: str) -> dict[str, str]:
    """Settings of "name=value, name=value"; lines and semicolons separate too."""
    if len(text) > _MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {_MOST_TEXT}.")

    out: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.replace("\n", ",").replace(";", ",").split(","))):
        name, value = assignment(part, field)
        if name in out:
            raise UserError(f"{field}: {name} is given twice; leave one of the two out.")
        out[name] = value
    return out


def parse_choice(text: str, field: str) -> Choice:
    """The choice of a line "sampler" or "sampler: name=value, name=value".

    Raises:
        UserError: another form; see :func:`choose`.
    """
    sampler, _, rest = text.strip().partition(":")
    if not sampler.strip():
        raise UserError(f"{field}: the line names no sampler; name one, for example fasthybrid: preset=fast.")
    if len(sampler) > _MOST_NAME:  # a server's event loop looks for it
        raise UserError(
            f"{field}: the name of the sampler is too long ({len(sampler)} characters); write, for example, "
            "fasthybrid: preset=fast."
        )

    return choose(sampler, parse_settings(rest, field))


def names_of_settings(entries: Mapping[str, Entry]) -> list[str]:
    """Names of all settings of these samplers, and "preset" first."""
    names = [PRESET]
    for entry in entries.values():
        names += knobs(entry.settings)

    return list(dict.fromkeys(names))
