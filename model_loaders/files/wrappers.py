"""Weights in the files of training scripts.

A script saves a dictionary of weights alone, or below a name ("model", "state_dict", "ema"), and the name of every
weight may begin with that of a module around the network ("module.", "model."). Both are removed here until the weights
have their own names. Averaged weights may lie beside the trained ones, and so may the arguments of the training.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Which weights are read from a file that holds averaged (EMA) weights beside the trained ones: auto takes the averaged
# ones, by which papers evaluate.
AUTO = "auto"
EMA = "ema"
TRAINED = "trained"
WEIGHTS = (AUTO, EMA, TRAINED)

# Names of averaged weights, and of trained ones in order of preference.
_AVERAGED = re.compile(
    r"(?i:(^|[._])(ema|shadow|averaged?|polyak|swa)\d*([._]|$))|(?i:(^|(?<!exp)[._])avg([._]|$))|[a-z]EMA([._]|$)"
)
_TRAINED = (
    "model",
    "module",
    "state_dict",
    "sd",
    "net",
    "network",
    "model_state_dict",
    "model_state",
    "model_sd",
    "params",
    "weights",
    "transformer",
    "generator",
    "student",
    "state",
)
# What lies beside the weights and holds tensors, too.
_BESIDE = re.compile(
    r"optim|sched|scaler|callback|loops?$|rng|random|sampler|hyper|hparams|args|config|cfg|loss|metric", re.I
)
# Keys of the arguments of a training.
_ARGUMENTS = ("args", "hyper_parameters", "hparams", "config", "cfg")
_MODULE = "module."  # of DistributedDataParallel, once or more often, in front of all names
# Inserted into names by torch.compile and by the wrappers of FSDP and of activation checkpoints, also within a name.
_INSERTED = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
_COUNT = "n_averaged"  # of torch's AveragedModel
_LEVELS = 8  # of containers, and of prefixes


class NoWeights(Exception):
    """A file without weights.

    The message completes the sentence "<file> ..."; ``remedy`` says what to do.
    """

    def __init__(self, found: str, remedy: str):
        super().__init__(found)
        self.remedy = remedy


@dataclass(frozen=True)
class Unpacked:
    """The weights of a training's file."""

    state: dict[str, Tensor]  # weights by name
    arguments: dict[str, Any]  # plain values among the arguments of the training
    averaged: bool  # whether these are averaged weights
    notes: list[str] = field(default_factory=list)  # what was chosen without being asked for


def is_averaged(name: str) -> bool:
    """Whether a container or prefix of that name holds averaged weights."""
    return bool(_AVERAGED.search(name))


def unpack(content: Any, weights: str) -> Unpacked:
    """The weights in the content of a file of ``torch.save``; ``weights`` is one of :data:`WEIGHTS`.

    Of several dictionaries without a usual name all are taken, each with its key as a prefix of the names.

    Raises:
        NoWeights: if there are none.
    """
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    averaged = False
    for _ in range(_LEVELS):  # a pickled dictionary may contain itself
        if not isinstance(content, Mapping):
            raise NoWeights(
                f"holds a {type(content).__name__}, not a dictionary of weights", "save only its state_dict"
            )

        arguments = {**_arguments(content), **arguments}
        names = _containers(content, weights, notes)
        if len(names) != 1:
            content = _joined(content, names) if names else content
            break

        averaged = averaged or is_averaged(names[0])
        content = content[names[0]]

    state = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            state[name] = value.detach()
    if not state:
        names = [name for name in content if isinstance(name, str)]
        raise NoWeights(f"holds no tensors, only {listed(names)}", "choose a file with a model's weights")

    return Unpacked(state, arguments, averaged, notes)


def _joined(content: Mapping[Any, Any], names: Iterable[str]) -> dict[str, Any]:
    """The entries of several dictionaries, with their keys as prefixes."""
    entries = {}
    for outer in names:
        for inner, value in content[outer].items():
            entries[f"{outer}.{inner}"] = value

    return entries


def _containers(content: Mapping[Any, Any], weights: str, notes: list[str]) -> list[str]:
    """The keys of ``content`` below which the weights are; none if it holds them itself."""
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    nests = [name for name, value in named.items() if not _BESIDE.search(name) and _holds_tensors(value, _LEVELS)]
    averaged = [name for name in nests if is_averaged(name)]
    trained = [name for name in _TRAINED if name in nests]
    if not averaged and not trained:
        if any(isinstance(value, Tensor) and value.ndim > 1 for value in content.values()):
            return []  # weights, with something beside them
        return nests

    if averaged and (weights != TRAINED or not trained):
        if trained and weights == AUTO:
            notes.append("FastAR uses the averaged (EMA) weights; the file also holds the trained weights")
        if len(averaged) > 1:
            notes.append(
                f"FastAR uses the averaged weights {averaged[0][:40]}; the file holds several ({listed(averaged)})"
            )
        return averaged[:1]

    unnamed = [name for name, value in named.items() if is_averaged(name) and _without_names(value)]
    if unnamed and not averaged:
        if weights == AUTO:
            notes.append(
                f"the averaged weights of the file ({unnamed[0][:40]}) have no names, so FastAR uses the trained "
                "weights"
            )
        if weights == EMA:
            raise NoWeights(
                f"holds averaged (EMA) weights ({unnamed[0][:40]}) without the names of the tensors, "
                "so FastAR cannot match them to the network",
                "set weights to auto, which then reads the weights that are not averaged",
            )

    return trained[:1]


def _holds_tensors(value: object, levels: int, seen: set[int] | None = None) -> bool:
    """Whether a dictionary holds a tensor that can be a weight, directly or in an inner one.

    A single number is none: it counts steps.
    """
    seen = set() if seen is None else seen
    if not isinstance(value, Mapping) or not levels or id(value) in seen:
        return False

    seen.add(id(value))
    for inner in value.values():
        if isinstance(inner, Tensor) and inner.ndim > 0 or _holds_tensors(inner, levels - 1, seen):
            return True

    return False


def _without_names(value: object) -> bool:
    """Whether these are tensors in a list, or a dictionary of such lists."""
    lists = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(entry, (list, tuple)) and entry and isinstance(entry[0], Tensor) for entry in lists)


def _arguments(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Plain values of the arguments that lie beside weights."""
    found: dict[str, Any] = {}
    for key in _ARGUMENTS:
        given = content.get(key)
        if isinstance(given, argparse.Namespace):
            given = vars(given)
        if isinstance(given, Mapping):
            plain = {name: value for name, value in given.items() if isinstance(name, str) and _is_plain(value)}
            found = {**plain, **found}

    return found


def _is_plain(value: object) -> bool:
    """Whether a value is None, a text, or a finite number of at most 64 bits."""
    if value is None or isinstance(value, str):
        return True

    return isinstance(value, (bool, int, float)) and abs(value) < 1 << 63


def listed(names: Iterable[Any], most: int = 5) -> str:
    """The first names of a collection, for a message."""
    names = sorted(map(str, names))
    first = ", ".join(name[:60] for name in names[:most])
    if len(names) > most:
        first += ", ..."

    return first or "nothing"


def unwrapped(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Weights without what wrappers of PyTorch put into their names, and whether they are those of an AveragedModel.

    A prefix is removed if all names have it. Names that would become equal stay as they are.
    """
    averaged = _COUNT in state and len(state) > 1
    names = {name: _INSERTED.sub("", name) for name in state if not (averaged and name == _COUNT)}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}

    for _ in range(_LEVELS):
        if all(name.startswith(_MODULE) for name in names.values()):
            names = {name: short.removeprefix(_MODULE) for name, short in names.items()}

    return {short: state[name] for name, short in names.items()}, averaged
