"""The numbers that a node shows for a preset, and the settings of a run from the numbers that arrive with one.

What stands on the screen is what is used: the editor fills in the numbers of a preset for the connected model and
sends them all, and a number that is changed by hand makes the preset custom. The preset sets the numbers that a program
leaves out. Only where someone chose a preset and nobody chose the numbers beside it does it set all of them, and the
node says so: see :meth:`Shown.settings_sent`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..samplers.settings import filled_in, knobs, make, setting_in_words, shown
from . import presets
from .choice import ModelFacts

# The first option of a node without presets: what the model's file recommends, else the defaults.
RECOMMENDED = "recommended"
# Options of the preset widget: of an accelerator, and of a node that has no presets.
PRESETS = presets.NAMES
PLAIN = (RECOMMENDED, presets.CUSTOM)
# Settings that presets leave alone: parallel, which changes no image, and the detail of Tar's codes.
FREE = ("parallel", "detail")

# How numbers came into a graph that names a preset beside them, as far as the graph tells. Nothing is known of "".
UNKNOWN = ""
# Someone chose them: one arrives over a link, or the editor showed this preset's, so those that differ were changed.
CHOSEN = "chosen"
# The editor showed this preset's numbers for a full-size model, because it could not see which model arrives.
WITHOUT_MODEL = "without model"


@dataclass(frozen=True)
class Sent:
    """The numbers of a node as they arrived."""

    option: str  # of the preset widget
    values: Mapping[str, Any]  # setting name to value; any may be left out
    named: bool = True  # whether the preset was sent; else ``option`` is the first one
    origin: str = UNKNOWN  # UNKNOWN, CHOSEN or WITHOUT_MODEL


@dataclass(frozen=True)
class Shown:
    """The numbers of a node for each option of its preset widget, for one model."""

    kind: type  # class of the settings
    options: Sequence[str]
    model: ModelFacts = ModelFacts()
    steps: int | None = None  # of the sampler, for a cache, whose settings do not hold them

    def settings(self, option: str, values: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The settings of an option, with ``values`` in the place of its own."""
        preset = presets.CUSTOM if option == RECOMMENDED else option
        return self.model.settings(self.kind, preset, values, self.steps)

    def numbers(self, option: str) -> dict[str, Any]:
        """What the node shows for an option: with the model's own values where a setting is None."""
        return self._numbers_of(self.settings(option))

    def settings_sent(self, sent: Sent) -> tuple[Any, str]:
        """The settings of a run from what was sent, and what the node says of them; "" if it has nothing to say.

        Numbers that were sent are used. If the preset alone was chosen, it sets them all.
        """
        whose = self.whose(sent)
        if whose:
            free = {name: value for name, value in sent.values.items() if name in FREE}
            return self.settings(sent.option, free), (
                f"The preset {sent.option} set all numbers, because the numbers sent were {whose}; name custom to use "
                "them as sent."
            )

        used = self.settings(sent.option, sent.values)
        if not sent.named or sent.option == presets.CUSTOM:
            return used, ""
        return used, self._differing(sent.option, sent.values, used)

    def whose(self, sent: Sent) -> str:
        """Whose numbers were sent, in words, if nobody chose them one by one; "" if they are to be used.

        A program that sends what /object_info lists, or a graph that was exported from the editor, sends every number.
        If it names another preset and changes none of them, they are all the node's defaults or all those of the other
        preset. The editor sends a full-size model's where it cannot tell which model arrives.
        """
        names = [name for name in knobs(self.kind) if name not in FREE]
        complete = all(name in sent.values for name in names)
        if not sent.named or sent.option == presets.CUSTOM or not complete:
            return ""

        found = filled_in(make(self.kind, sent.values), {})

        def are(numbers: Mapping[str, Any]) -> bool:
            return all(found[name] == numbers[name] for name in names)

        if are(self.numbers(sent.option)):
            return ""

        if sent.origin == WITHOUT_MODEL:
            full_size = (Shown(self.kind, self.options, steps=steps) for steps in (self.steps, None))
            return "for a full-size model" if any(are(one.numbers(sent.option)) for one in full_size) else ""
        if sent.origin == CHOSEN:
            return ""

        if are(filled_in(make(self.kind, usual_numbers(self.kind, self.options)), {})):
            return "the node's defaults"
        for other in self.options:
            if other not in (sent.option, presets.CUSTOM) and are(self.numbers(other)):
                return f"the numbers of {other}"
        return ""

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
        return f"custom: these numbers are not those of *{option}* for this model ({few})."

    def _numbers_of(self, settings: Any) -> dict[str, Any]:
        """Settings with the model's own values where one is None."""
        return filled_in(settings, self.model.own_values(settings))


def usual_numbers(kind: type, options: Sequence[str]) -> dict[str, Any]:
    """The settings of a new node, those of its first option for a full-size model; None where they are a model's."""
    return vars(Shown(kind, options).settings(options[0]))
