"""What a preset fills in: the numbers of its settings for the model of a loader.

The editor asks ``POST /fastar/fill`` (web/js/presets.js) when a preset is chosen or a loader changes. The numbers come
from the functions that make the settings of a run, so the two agree. No weights are loaded and nothing is downloaded:
the header of the model's file tells its shapes and what it recommends. For a model that is not here yet, they come from
the catalogue entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from ..model_loaders.catalogue import hub
from ..model_loaders.files.checkpoint import parse_json
from ..model_loaders.files.wrappers import WEIGHTS
from ..runs import loading, presets, registry
from ..runs.choice import ModelFacts
from ..runs.loading import AUTO
from ..runs.registry import SAMPLERS
from ..samplers.mar.lazy.settings import CacheSettings
from ..samplers.tokens.tar import TarPromptSettings
from . import host, loaders, samplers
from .schema import checked_preset, describe
from .sent import PLAIN, PRESETS, free_of, numbers

# The language model of Tar, which no family of the registry is; and it in words.
_LANGUAGE = "tar language model"
_LANGUAGE_TITLE = "Tar"


PATH = "/fastar/fill"
# Bytes of a request; a loader's widgets take a few hundred.
MOST_BYTES = 1 << 16


def answer(body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to a request; see :func:`fill` for its fields. Raises nothing."""
    try:
        asked = parse_json(body.decode("utf-8", "replace"), "the request", "fill")
        found = fill(asked.get("node"), asked.get("preset"), asked.get("loader"), asked.get("steps"))
    except UserError as problem:
        return 400, {"error": str(problem)}
    except Exception as problem:  # a file may be damaged in any way
        logging.getLogger(__name__).warning("FastAR: a preset was not filled in", exc_info=True)
        return 400, {"error": f"checkpoint: the file cannot be read ({first_line(problem)}); choose a different file."}

    return 200, found


def fill(node: Any, preset: Any, loader: Any = None, steps: Any = None) -> dict[str, Any]:
    """The numbers of a preset for the model that a loader would load.

    Args:
        node: type of the node with the preset.
        preset: an option of its preset widget.
        loader: ``{"class_type": ..., "inputs": {...}}`` with the loader's widgets; None where none is connected, which
            counts as a full-size model.
        steps: of the sampler that LazyMAR Cache feeds, if it is known.

    Returns:
        ``values``, setting name to value, empty for *custom*; and ``model``, what they are for, in words.

    Raises:
        UserError: an unknown node, preset or file, or a file that cannot be read.
    """
    kind, options = _settings_of(node)
    name = checked_preset(preset, options)
    model, words = model_of(loader)
    if name == presets.CUSTOM:
        return {"values": {}, "model": words}

    values = numbers(kind, name, model, steps if isinstance(steps, int) else None)
    for free in free_of(kind, name):
        values.pop(free, None)
    return {"values": values, "model": words}


@lru_cache(maxsize=1)
def _kinds() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Node type to the class of its settings and the options of its preset widget."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {
        "FastARTarPrompt": (TarPromptSettings, PLAIN),
        "FastARLazyMARCache": (CacheSettings, PRESETS),
    }
    for node in samplers.NODES:
        if hasattr(node, "sampler"):
            found[node.node_id] = (SAMPLERS[node.sampler].settings, node.options())
    return found


def _settings_of(node: Any) -> tuple[Any, tuple[str, ...]]:
    """The class of a node's settings and the options of its preset widget."""
    if not isinstance(node, str) or node not in _kinds():
        raise UserError(
            f"node: it got {describe(node)}, which is not the type of a node with a preset; send the type of a node "
            "that has a preset."
        )

    return _kinds()[node]


@lru_cache(maxsize=1)
def _families() -> dict[str, str]:
    """Type of a loader to the family that it loads."""
    found = {loader.node_id: loader.family for loader in loaders.NODES}
    return {**found, loaders.LoadTar.node_id: _LANGUAGE}


def reads_negatives(loader: Any) -> bool | None:
    """Whether the models of a loader read a negative prompt; None if it is no loader of ours."""
    kind = loader.get("class_type") if isinstance(loader, Mapping) else None
    family = _families().get(kind) if isinstance(kind, str) else None
    if family is None:
        return None

    return family != _LANGUAGE and registry.FAMILIES[family].reads_negatives


def model_of(loader: Any) -> tuple[ModelFacts, str]:
    """What the numbers of a preset depend on, of the model that a loader would load; and it in words: "demo MAR"."""
    if loader is None:
        return ModelFacts(), "full-size model"

    kind = loader.get("class_type") if isinstance(loader, Mapping) else None
    inputs = loader.get("inputs") if isinstance(loader, Mapping) else None
    if not isinstance(kind, str) or kind not in _families() or not isinstance(inputs, Mapping):
        raise UserError(
            "loader: this is not a loader node of FastAR, or its inputs are missing; give the loader as it stands in "
            "the workflow's JSON, with class_type and inputs."
        )

    family = _families()[kind]
    files = loading.LANGUAGE if family == _LANGUAGE else registry.FAMILIES[family].files
    choice = loaders.listed(inputs.get("checkpoint"), files)
    side = loaders.tokens_per_side(_typed(inputs, "grid", loaders.GRIDS), _typed(inputs, "size", loaders.SIZES))
    weights = _typed(inputs, "weights", WEIGHTS)

    folders = host.folders.paths(*loaders.folders_of(files))
    entry = hub.absent(choice, files, folders)
    if entry is not None:
        return _of_entry(entry, family)

    path = hub.resolve(choice, files, folders, host.folders.paths(host.folders.FOLDER)[0])
    return _of_file(family, choice, path, _version(path), side, weights)


def _typed(inputs: Mapping[str, Any], widget: str, options: Any) -> str:
    """The value of a menu of a loader; "auto" where it has none, or where the value arrives over a link."""
    value = str(inputs.get(widget, AUTO))
    return value if value in map(str, options) else AUTO


def _version(path: Path) -> tuple[int, int]:
    """Properties of a file that change when it is replaced."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


@lru_cache(maxsize=32)
def _of_file(
    family: str, choice: str, path: Path, version: tuple[int, int], side: int | None, weights: str
) -> tuple[ModelFacts, str]:
    """What the file of a model tells."""
    if family == _LANGUAGE:
        network, stated = loading.outline_language_model(path)
        demo = any(entry.id == choice and entry.built_in for entry in hub.entries(loading.LANGUAGE))
        return ModelFacts(demo, recommended=stated, model=network), _words(family, demo)

    ready = loading.outline(family, choice, path, side, weights)
    return ready.facts, _words(family, ready.demo)


def _of_entry(entry: hub.Entry, family: str) -> tuple[ModelFacts, str]:
    """What is known of a model that is not here yet; catalogue entries that are not built in are full-size models."""
    words = _words(family, demo=False)
    if family == _LANGUAGE:
        return ModelFacts(), words

    about = registry.FAMILIES[family]
    model = _outlined(family, entry.id)
    return ModelFacts.of(model, about.published(model)), words


@lru_cache(maxsize=4)
def _outlined(family: str, choice: str) -> Any:
    """The model of a catalogue entry without weights."""
    about = registry.FAMILIES[family]
    (entry,) = (entry for entry in hub.entries(about.files) if entry.id == choice)
    return about.outlined(entry)


def _words(family: str, demo: bool) -> str:
    """A model in words."""
    title = _LANGUAGE_TITLE
    if family != _LANGUAGE:
        _, _, title = registry.FAMILIES[family].words.partition(" ")  # without its article
    return f"{'demo' if demo else 'full-size'} {title}"
