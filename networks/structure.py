"""Parameter names: how many blocks they state, and the official names for networks with names of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# Building a network takes time per block. The deepest official one has 48 blocks; autoencoders have 5 levels of 2
# blocks.
MOST_BLOCKS = 512
MOST_LEVELS = 16


def depth(names: Iterable[str], prefix: str, most: int = MOST_BLOCKS) -> int:
    """Count the blocks ``<prefix>0.``, ``<prefix>1.``, ...

    Raises:
        ValueError: if the blocks are not numbered without gaps, or if there are more than ``most``.
    """
    found = {name[len(prefix) :].split(".", 1)[0] for name in names if name.startswith(prefix)}
    if len(found) > most:
        raise ValueError(f"it has {len(found)} blocks named {prefix}*, more than the limit of {most}")
    if found != {str(i) for i in range(len(found))}:
        raise ValueError(f"its blocks {prefix}* are not numbered 0 to {len(found) - 1}")

    return len(found)


def without(net: nn.Module, part: nn.Module) -> nn.Module:
    """A module with all parts of a network except one child. It shares the network's tensors."""
    rest = nn.Module()
    for name, child in net.named_children():
        if child is not part:
            rest.add_module(name, child)
    for name, parameter in net.named_parameters(recurse=False):
        rest.register_parameter(name, parameter)

    return rest


def official_names(net: nn.Module, official: Callable[[str], str]) -> None:
    """Save and load a network's parameters under official names; ``official`` maps the network's own names to them."""

    def saved(net: nn.Module, state: dict[str, Any], prefix: str, *about: object) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[prefix + official(name.removeprefix(prefix))] = state.pop(name)

    def loaded(net: nn.Module, state: dict[str, Any], prefix: str, *about: object) -> None:
        # Names are mapped by layer, not by parameter: a host's layer may create its parameters only now, or may store
        # more parameters than the network has.
        layers = {}
        for path, layer in net.named_modules():
            if not any(layer.children()):
                layers[official(f"{path}.")] = f"{path}."

        given = {name: state.pop(name) for name in [*state] if name.startswith(prefix)}
        for name, tensor in given.items():
            path, dot, last = name.removeprefix(prefix).rpartition(".")
            state[prefix + layers.get(path + dot, path + dot) + last] = tensor

    net.register_state_dict_post_hook(saved)
    net.register_load_state_dict_pre_hook(loaded)
