"""Checkouts of reference implementations for the command ``against``: how their modules are imported, and what is timed.

Nothing is copied from a checkout and nothing but its modules is needed. What they import without using it for sampling, or
what is not installed, is replaced while they are imported (:data:`STANDINS`); calls that move tensors to a GPU, or make them there,
have no effect.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..assembly import Ready
from ..errors import UserError


@dataclass(frozen=True, eq=False)
class Pair:
    """One kind of work, done by both programs with the same weights.

    Attributes:
        work: what is drawn, for the table.
        model: our model.
        ours: draws a batch with the given seed; returns our report.
        theirs: the same work in the reference implementation.
        compare: the largest difference of the two results, for a run that both do alike; None: not comparable.
        tolerance: the largest difference that counts as equal.
    """

    work: str
    model: Ready
    ours: Callable[[int], Any]
    theirs: Callable[[], Any]
    compare: Callable[[], float] | None
    tolerance: float = 0.0


# ------------------------------------------------------------------------------------------------ importing a checkout


class _Block(nn.Module):
    """timm's ViT block, which MAR imports: the same parameters and the same PyTorch calls."""

    class _Attention(nn.Module):
        def __init__(self, dim: int, heads: int):
            super().__init__()
            self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))

    class _MLP(nn.Module):
        def __init__(self, dim: int, hidden: int):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.gelu(self.fc1(x)))

    def __init__(self, dim: int, heads: int, mlp_ratio: float = 4.0, norm_layer: Any = nn.LayerNorm, **_: Any):
        super().__init__()
        self.norm1, self.attn = norm_layer(dim), self._Attention(dim, heads)
        self.norm2, self.mlp = norm_layer(dim), self._MLP(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Mlp(_Block._MLP):
    def __init__(self, in_features: int, hidden_features: int, **_: Any):
        super().__init__(in_features, hidden_features)


class _Unused:
    """Stands in for what sampling does not use."""

    def __init__(self, *_: Any, **__: Any):
        pass


# Modules that a checkout imports, and their attributes here.
STANDINS: Mapping[str, Mapping[str, Any]] = {
    "tqdm": {"tqdm": lambda items, *_, **__: items},
    "scipy": {},
    "scipy.stats": {"truncnorm": _Unused},  # the training's mask ratio
    "timm": {},
    "timm.layers": {"Mlp": _Mlp, "DropPath": _Unused, "use_fused_attn": lambda: True},
    "timm.models": {},
    "timm.models.vision_transformer": {"Block": _Block},
    "einops": {"rearrange": _Unused},  # the quantizer's training
    # Other parts of Tar's package, which its __init__ imports and AR-DTok does not use.
    "tok": {},
    "tok.utils": {"ScalingLayer": _Unused},
}


@contextmanager
def checkout(root: Path, package: str = "") -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of a checkout by name; they are forgotten by the interpreter afterwards.

    Args:
        root: first entry of the import path.
        package: a package of the checkout whose ``__init__`` is not run.
    """
    importlib.import_module(
        "torch._inductor.config"
    )  # imported by most checkouts; before the stand-ins, which it would see
    before = dict(sys.modules)
    for name in [n for n in sys.modules if n.split(".")[0] in _LOCAL]:
        del sys.modules[name]
    for name, attributes in STANDINS.items():
        if name.split(".")[0] == "tok" and not package:
            continue
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(attributes)
        module.__path__ = [str(root / package)] if name == package else []  # type: ignore[attr-defined]
        sys.modules[name] = module
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module
    except ImportError as e:
        raise UserError(f"against: {root} cannot be imported: {e}.") from e
    finally:
        sys.path.remove(str(root))
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in _LOCAL or name in STANDINS:
                del sys.modules[name]
        sys.modules.update(before)


# Top-level packages of the checkouts.
_LOCAL = ("models", "diffusion", "spec_decode", "util", "utils", "autoregressive", "tok")


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


def load_weights(theirs: nn.Module, ours: nn.Module, unused: tuple[str, ...] = ()) -> nn.Module:
    """Give the reference our weights; every parameter of either must exist in the other, except ``unused`` ones of theirs."""
    found = theirs.load_state_dict(ours.state_dict(), strict=False)
    missing = [k for k in found.missing_keys if k not in unused]
    if missing or found.unexpected_keys:
        raise UserError(f"against: the reference's weights differ from ours: {(missing + found.unexpected_keys)[0]}.")
    return theirs.eval().requires_grad_(False)
