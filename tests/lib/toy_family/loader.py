"""The toy network, its model and its loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...networks.ops import FAST, Operations
from ...networks.speed import Recordable
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_dtype, read

SIDE = 4


@dataclass(frozen=True)
class ToyConfig:
    """Shape of the network."""

    channels: int
    classes: int = 1000


class Toy(Recordable):
    """One number, which scales the noise of every token."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config = config
        self.toy_scale = nn.Parameter(torch.empty(config.channels))


@dataclass(frozen=True)
class ToyModel:
    """A toy with the metadata of its file."""

    net: Toy
    name: str
    label_set: str = ""
    note: str = ""
    family: ClassVar[str] = "toy"
    condition: ClassVar[str] = "class"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        return {"transformer": self.net}

    @property
    def device(self) -> torch.device:
        return self.net.toy_scale.device

    def to_latents(self, values: Tensor) -> Tensor:
        """Tokens [B, L, C] to latents [B, C, h, w]."""
        return values.float().unflatten(1, (SIDE, SIDE)).permute(0, 3, 1, 2)


@in_own_state
def load_toy(
    path: str | Path,
    dtype: str | Precision = AUTO,
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = FAST,
) -> ToyModel:
    """Load a toy from its file; arguments as of the other loaders."""
    file = read(path, "toy", weights=weights)
    config = ToyConfig(channels=len(file.state["toy_scale"]))
    compute = choose_dtype(dtype, device, "toy")
    net = ck.load_strictly(file, lambda layers: Toy(config), operations=operations, dtype=compute, device=device)
    return ToyModel(net, file.metadata.get("name", file.path.stem), file.metadata.get("label_set", ""))
