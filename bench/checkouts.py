"""Checkouts of reference implementations for the command ``against``: how their modules are imported, and what is timed.

Nothing is copied from a checkout. The packages that it imports (timm, scipy, tqdm, einops) have to be installed; calls that move tensors
to a GPU, or make them there, have no effect.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError


@dataclass(frozen=True, eq=False)
class Pair:
    """One kind of work, done by both programs with the same weights."""

    work: str  # what is drawn, for the table
    ours: Callable[[int], Any]  # draws a batch with the given seed
    theirs: Callable[[], Any]  # the same work in the reference implementation
    compare: Callable[[], float] | None  # the largest difference of the results, for a run that both do alike
    tolerance: float = 0.0  # the largest difference that counts as equal


# Top-level packages of the checkouts.
_LOCAL = ("models", "diffusion", "util", "utils", "autoregressive", "tok")


@contextmanager
def checkout(root: Path, package: str = "") -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of a checkout by name, without running the ``__init__`` of ``package``. They are forgotten afterwards."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in _LOCAL}
    for name in before:
        del sys.modules[name]
    if package:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(root / package)]
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module
    except ImportError as e:
        raise UserError(f"against: {root} cannot be imported ({e}); install what the checkout needs.") from e
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] in _LOCAL]:
            del sys.modules[name]
        sys.modules.update(before)


# Functions that references call with device="cuda".
_FACTORIES = ("zeros", "ones", "randn", "tensor")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Calls that move a tensor to a GPU leave it where it is, and those that make one there make it on the CPU."""
    original, factories = Tensor.cuda, {name: getattr(torch, name) for name in _FACTORIES}

    def make(name: str, *arguments: Any, device: Any = None, **named: Any) -> Tensor:
        return factories[name](*arguments, **named)

    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    for name in _FACTORIES:
        setattr(torch, name, partial(make, name))
    try:
        yield
    finally:
        Tensor.cuda = original  # type: ignore[method-assign]
        for name, factory in factories.items():
            setattr(torch, name, factory)


def load_weights(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    """Give the reference our weights; every parameter of either must exist in the other."""
    found = theirs.load_state_dict(ours.state_dict(), strict=False)
    if wrong := [*found.missing_keys, *found.unexpected_keys]:
        raise UserError(f"against: the reference's weights differ from ours: {wrong[0]}.")
    return theirs.eval().requires_grad_(False)
