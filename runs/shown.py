"""The numbers that a node shows for a preset, and the settings of a run from the numbers that arrive with one.

A number that arrives is used, and the preset sets those that are left out. The editor shows the numbers of a preset for
the connected model and leaves them out of prompts, see web/js/presets.js: a number that is changed by hand makes the
preset *custom*, with which all are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..samplers.settings import filled_in, setting_in_words, shown
from . import presets
from .choice import ModelFacts

# The first option of a node without presets: what the model's file recommends, else the defaults.
RECOMMENDED = "recommended"
# Options of the preset widget: of an accelerator, and of a node that has no presets.
PRESETS = presets.NAMES
PLAIN = (RECOMMENDED, presets.CUSTOM)
# Settings that presets leave alone: parallel, which changes no image, and the detail of Tar's codes. ZipAR's PJD alone
# sets one of them.
FREE = ("parallel", "detail")


def free_of(kind: type, option: str) -> tuple[str, ...]:
    """The settings of FREE that an option of the preset widget leaves alone, of settings of class ``kind``."""
    sets = {} if option == RECOMMENDED else presets.values(kind, option, demo=False)
    return tuple(name for name in FREE if name not in sets)


@dataclass(frozen=True)
class Shown:
    """The numbers of a node for each option of its preset widget, for one model."""

    kind: type  # class of the settings
    options: Sequence[str]
    model: ModelFacts = ModelFacts()
    steps: int | None = None  # of the sampler, for a cache, whose settings do not hold them

    def settings(self, option: str, values: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The settings of an option, in which ``values`` replace its own values."""
        preset = presets.CUSTOM if option == RECOMMENDED else option
        return self.model.settings(self.kind, preset, values, self.steps)

    def numbers(self, option: str) -> dict[str, Any]:
        """What the node shows for an option: with the model's own values where a setting is None."""
        return self._numbers_of(self.settings(option))

    def settings_sent(self, option: str, values: Mapping[str, Any]) -> tuple[Any, str]:
        """The settings of a run from the values that were sent, and the node's text about them; "" if it has nothing to
        say.

        Args:
            option: of the preset widget.
            values: setting name to value; any may be left out.
        """
        if option == presets.CUSTOM:
            return self.settings(option, values), ""

        used = self.settings(option, values)
        return used, self._differing(option, values, used)

    def _differing(self, option: str, names: Iterable[str], settings: Any) -> str:
        """What to say of numbers that arrived under a preset and are not its own; "" if all are."""
        used = self._numbers_of(settings)
        of_preset = self.numbers(option)

        differing: list[str] = []
        for name in names:
            if name not in FREE and used[name] != of_preset[name]:
                given = setting_in_words(name, used[name])
                differing.append(f"{given}, {option} has {shown(of_preset[name])}")

        if not differing:
            return ""
        few = "; ".join(differing[:3]) + ("; ..." if len(differing) > 3 else "")
        return f"custom: for this model, these numbers differ from *{option}* ({few})."

    def _numbers_of(self, settings: Any) -> dict[str, Any]:
        """Settings with the model's own values where one is None."""
        return filled_in(settings, self.model.own_values(settings))


def usual_numbers(kind: type, options: Sequence[str]) -> dict[str, Any]:
    """The settings of a new node, from its first option for a full-size model; None where they are a model's."""
    return vars(Shown(kind, options).settings(options[0]))
