"""The settings of a node as they arrived: from the editor, from a program, or in a saved graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.choice import ModelFacts
from ..runs.shown import CHOSEN, UNKNOWN, WITHOUT_MODEL, Sent
from ..samplers.settings import Settings, is_removed, removed_from
from . import graph
from .host.loaded import Loaded
from .schema import checked_preset


def facts_of(loaded: Loaded[Any]) -> ModelFacts:
    """What the settings of a run depend on."""
    return ModelFacts.of(loaded.model, loaded.recommended)


def numbers_sent(
    node: Any, preset: Any, options: Sequence[str], values: Mapping[str, Any], hides_model: bool | None = None
) -> Sent:
    """The numbers of a node's settings as they arrived with a preset, and how they came into its graph.

    Args:
        node: the class that executes.
        preset: as it arrived; None if it was left out.
        options: of the preset widget.
        values: the numbers that arrived.
        hides_model: whether the editor could not see the model that arrives; None: as for a sampler.

    Raises:
        UserError: a preset that the node does not have.
    """
    if preset is None:
        return Sent(options[0], values, named=False)

    option = checked_preset(preset, options)
    noted = graph.noted_preset(node) == option
    hides_model = graph.hides_model(node) if hides_model is None else hides_model

    origin = UNKNOWN
    if graph.linked(node, values):
        origin = CHOSEN
    elif noted:
        origin = WITHOUT_MODEL if hides_model else CHOSEN
    return Sent(option, values, origin=origin)


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
            is_removed(kind, name, value)
