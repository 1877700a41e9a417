"""Layers whose weights may be kept off the compute device and provided for the duration of a call.

A host with little device memory (ComfyUI) loads a network partially: it sets the ``source`` of the layers that may be left out. Without a
source, a layer uses its own weight. Only large layers that are called a few times per token can be left out, see
:func:`streamed_layers`; the diffusion head, norms, tables and small layers are always loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

# Containers whose linear layers may be left out, and further layers by their last name.
_BLOCKS = frozenset(("encoder_blocks", "decoder_blocks", "layers"))
_NAMES = frozenset(("tok_embeddings", "output"))


class WeightSource(Protocol):
    """Provides weights that are not on the compute device."""

    def away(self, layer: Streamed) -> bool:
        """Whether the layer's weight is off the device now."""
        ...

    def lend(
        self, layer: Streamed, x: Tensor, rows: tuple[int, int] | None = None
    ) -> AbstractContextManager[tuple[Tensor, Tensor | None]]:
        """Weight and bias on the device and in the dtype of ``x``, valid within the context.

        Args:
            rows: half-open range of the weight's rows, without bias; None: all.
        """
        ...

    def look_up(self, layer: Streamed, ids: Tensor) -> Tensor:
        """Rows ``ids`` int64 [...] of an embedding's weight [n, C], on the device of ``ids``; [..., C]."""
        ...


class Streamed:
    """Mixin of modules with ``weight`` and ``bias``.

    Attributes:
        source: provides the weight while it is off the device; None: it never is.
    """

    source: WeightSource | None = None

    def away(self) -> bool:
        """Whether the weight is off the device now."""
        return self.source is not None and self.source.away(self)

    def lend(
        self, x: Tensor, rows: tuple[int, int] | None = None
    ) -> AbstractContextManager[tuple[Tensor, Tensor | None]]:
        """The weight while it is off the device, see :meth:`WeightSource.lend`."""
        assert self.source is not None
        return self.source.lend(self, x, rows)

    def tensors(self) -> list[Tensor]:
        """Weight and bias."""
        held: list[Tensor | None] = [getattr(self, name) for name in ("weight", "bias")]
        return [t for t in held if t is not None]


class Embedding(Streamed, nn.Embedding):  # type: ignore[misc]
    """``nn.Embedding``. Off the device, rows are looked up where the weight is, and only they are copied."""

    bias = None

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] to [..., C]."""
        if self.source is not None and self.away():
            return self.source.look_up(self, ids)
        return super().forward(ids)


def streamed_layers(net: nn.Module) -> list[Streamed]:
    """The layers of a network that may be off the device: those of transformer blocks, output layer, and embedding of a
    language model."""
    return [
        module
        for name, module in net.named_modules()
        if isinstance(module, Streamed)
        and (name.rpartition(".")[2] in _NAMES or not _BLOCKS.isdisjoint(name.split(".")))
    ]


def away_bytes(net: nn.Module) -> int:
    """Bytes of the weights that are off the device now."""
    return sum(t.nbytes for layer in streamed_layers(net) if layer.away() for t in layer.tensors())


def remark(*nets: nn.Module) -> str:
    """What a report says about networks whose weights are partly off the device; "" for others."""
    away = sum(map(away_bytes, nets))
    if not away:
        return ""
    total = sum(p.nbytes for net in nets for p in net.parameters())
    return f"{away / 1e9:.2g} of {total / 1e9:.2g} GB of weights streamed from main memory, which is slower"
