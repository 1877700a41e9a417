"""The settings of a node as they arrived: from the editor, from a program, or in a saved graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runs.choice import ModelFacts
from ..samplers.settings import Settings, is_removed, removed_from
from . import graph
from .host.loaded import Loaded


def facts_of(loaded: Loaded[Any]) -> ModelFacts:
    """What the settings of a run depend on."""
    return ModelFacts.of(loaded.model, loaded.recommended)


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
