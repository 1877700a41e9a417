"""The numbers of a node: those that it shows for a preset, and those that arrive from the editor, a program or a saved
graph.

A number that arrives is used, and the preset sets those that are left out. A program that sends all defaults of
/object_info with a preset chose the preset alone, as ComfyScript does, and gets its numbers.

The editor shows the numbers of a preset for the connected model and leaves them out of prompts, see web/js/presets.js:
a number that is changed by hand makes the preset *custom*, with which all are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs import presets
from ..runs.choice import ModelFacts
from ..samplers.settings import (
    Settings,
    check_removed,
    filled_in,
    knobs,
    removed_from,
    setting_in_words,
    settings_from,
    shown,
)
from . import graph
from .host.loaded import Loaded

# The first option of a node without presets: what the model's file recommends, else the defaults.
RECOMMENDED = "recommended"
# Options of the preset widget: of an accelerator, and of a node that has no presets.
PRESETS = presets.NAMES
PLAIN = (RECOMMENDED, presets.CUSTOM)
# Settings that presets leave alone: parallel, which changes no image, and the detail of Tar's codes. ZipAR's PJD alone
# sets one of them.
FREE = ("parallel", "detail")


def facts_of(loaded: Loaded[Any]) -> ModelFacts:
    """What the settings of a run depend on."""
    return ModelFacts.of(loaded.model, loaded.recommended)


def free_of(kind: type, option: str) -> tuple[str, ...]:
    """The settings of FREE that an option of the preset widget leaves alone, of settings of class ``kind``."""
    sets = {} if option == RECOMMENDED else presets.values(kind, option, demo=False)
    return tuple(name for name in FREE if name not in sets)


def numbers(kind: type, option: str, model: ModelFacts, steps: int | None = None) -> dict[str, Any]:
    """What a node shows for an option of its preset widget: with the model's own values where a setting is None.

    Args:
        kind: class of the node's settings.
        steps: of the sampler, for a cache, whose settings do not hold them.
    """
    return _with_own(_settings(kind, option, model, {}, steps), model)


def settings_sent(
    kind: type,
    options: Sequence[str],
    option: str,
    model: ModelFacts,
    values: Mapping[str, Any],
    steps: int | None = None,
) -> tuple[Any, str]:
    """The settings of a run from the values that were sent, and the node's text about them; "" if it has nothing to
    say.

    Args:
        kind, option, model, steps: as of :func:`numbers`.
        options: of the node's preset widget.
        values: setting name to value; any may be left out.
    """
    used = _settings(kind, option, model, values, steps)
    if option == presets.CUSTOM:
        return used, ""

    if _are_defaults(kind, options, values):
        left_alone = free_of(kind, option)
        chosen = {name: value for name, value in values.items() if name in left_alone}
        of_preset = _settings(kind, option, model, chosen, steps)
        if _with_own(of_preset, model) == _with_own(used, model):
            return of_preset, ""
        return of_preset, (
            f"The preset {option} set all numbers, because the request contained the node's default numbers; to "
            "use the default numbers, choose the preset custom."
        )

    found = _with_own(used, model)
    expected = numbers(kind, option, model, steps)

    differing: list[str] = []
    for name in values:
        if name not in FREE and found[name] != expected[name]:
            given = setting_in_words(name, found[name])
            differing.append(f"{given}, {option} has {shown(expected[name])}")

    if not differing:
        return used, ""
    few = "; ".join(differing[:3]) + ("; ..." if len(differing) > 3 else "")
    return used, f"custom: for this model, these numbers differ from *{option}* ({few})."


def _are_defaults(kind: type, options: Sequence[str], values: Mapping[str, Any]) -> bool:
    """Whether all numbers were sent as /object_info lists them."""
    names = [name for name in knobs(kind) if name not in FREE]
    if not all(name in values for name in names):
        return False

    found = filled_in(settings_from(kind, values), {})
    usual = filled_in(settings_from(kind, usual_numbers(kind, options)), {})
    return all(found[name] == usual[name] for name in names)


def usual_numbers(kind: type, options: Sequence[str]) -> dict[str, Any]:
    """The settings of a new node, from its first option for a full-size model; None where they are a model's."""
    return vars(_settings(kind, options[0], ModelFacts(), {}))


def _settings(kind: type, option: str, model: ModelFacts, values: Mapping[str, Any], steps: int | None = None) -> Any:
    """The settings of an option, in which ``values`` replace its own values."""
    preset = presets.CUSTOM if option == RECOMMENDED else option
    return model.settings(kind, preset, values, steps)


def _with_own(settings: Any, model: ModelFacts) -> dict[str, Any]:
    """Settings with the model's own values where one is None."""
    return filled_in(settings, model.own_values(settings))


def take_removed(node: Any, kind: type[Settings], inputs: dict[str, Any]) -> dict[str, Any]:
    """What a graph or a script still gives for settings that were removed from ``kind``, the node's settings.

    ComfyUI passes no input that the schema lacks, but a script does: it is taken out of ``inputs``.
    """
    given = {name: inputs.pop(name, graph.typed(node, name)) for name in removed_from(kind)}
    return {name: value for name, value in given.items() if value is not None}


def expect_removed_to_hold(kind: type[Settings], removed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check the values that a graph still holds for settings that were removed from ``kind``.

    Args:
        own: what the model decides, by name.

    Raises:
        UserError: a value is not the one that holds now.
    """
    for name, value in removed.items():
        if name not in own or value != own[name]:
            check_removed(kind, name, value)
