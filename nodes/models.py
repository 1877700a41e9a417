"""Values of the model sockets, under ComfyUI's memory management."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from ..model_loaders.networks.mar import MARModel
from . import host
from .host import ModelPatcher
from .preview import MOST_IMAGES
from .vae import FastARVAE


class Model(Protocol):
    """A network with what is known about it; see ``model_loaders/networks``."""

    @property
    def net(self) -> nn.Module: ...


M = TypeVar("M", bound=Model)

# In ``Loaded.parts`` of a de-tokenizer: the TA-Tok that reads semantic codes.
TA_TOK = "ta_tok"


@dataclass(eq=False)
class Loaded(Generic[M]):
    """Value of a model socket. It owns the patchers, because ComfyUI's list of loaded models holds no reference."""

    model: M
    patcher: ModelPatcher  # moves the weights of ``net``, or of the first of a MAR's parts
    vae: FastARVAE | None = None  # decoder of the same loader, for live previews
    # Further networks of the same loader by name. Each has its own patcher and is on the device only while needed.
    parts: Mapping[str, Loaded[Any]] = field(default_factory=dict)
    recommended: Mapping[str, Any] = field(default_factory=dict)  # settings of the model's file, for presets
    further: Sequence[ModelPatcher] = ()  # of the model's other parts
    speed: str = ""  # how the model runs, a choice of the loader

    @staticmethod
    def of(
        model: M,
        vae: FastARVAE | None = None,
        parts: Mapping[str, Loaded[Any]] | None = None,
        recommended: Mapping[str, Any] | None = None,
        speed: str = "",
    ) -> Loaded[M]:
        """Place a model under ComfyUI's memory management: the parts of a MAR one by one, of other models ``net``."""
        compute = host.get_compute_device()
        offload = host.get_offload_device()
        nets = list(model.parts.values()) if isinstance(model, MARModel) else [model.net]
        patchers = [_NotifyingPatcher(host.allow_streaming(net, compute), compute, offload) for net in nets]
        return Loaded(model, patchers[0], vae, parts or {}, recommended or {}, patchers[1:], speed)

    @property
    def patchers(self) -> list[ModelPatcher]:
        """Of all parts of the model; not of the decoder, and not of ``parts``."""
        return [self.patcher, *self.further]


def to_device(
    loaded: Loaded[Any], memory: float, latents: tuple[int, int, int, int], others: Sequence[ModelPatcher] = ()
) -> None:
    """Load a model and other networks with ``memory`` bytes free to work in.

    The decoder is loaded too, if there are previews of ``latents`` [B, C, h, w].
    """
    patchers = [*loaded.patchers, *others]
    vae = loaded.vae
    if vae is not None and host.previews_wanted():
        patchers.append(vae.patcher)
        memory += min(MOST_IMAGES, latents[0]) * vae.memory_used_decode(latents, vae.vae_dtype)
    host.load_weights(list(dict.fromkeys(patchers)), memory)


def load_to_device(loaded: Loaded[Any], memory: float) -> None:
    """Load a model without previews (a text encoder, say) to its device, with ``memory`` bytes free to work in."""
    host.load_weights([loaded.patcher], memory)


class ModelCache:
    """Holds one model that is expensive to load, until another one is stored or ComfyUI unloads its weights.

    The arguments return the compute device and the device of networks that are not in use.
    """

    def __init__(self, get_compute: Callable[[], torch.device], get_offload: Callable[[], torch.device]) -> None:
        self._get_compute = get_compute
        self._get_offload = get_offload
        self._key: Hashable = None
        self._loaded: Loaded[Any] | None = None

    def get(self, key: Hashable, load: Callable[[], Model]) -> Loaded[Any]:
        """The model stored under ``key``; if there is none, the result of ``load`` is stored."""
        if self._loaded is None or self._key != key:
            self._loaded = None  # frees memory before the next model is loaded
            model = load()
            patcher = _NotifyingPatcher(model.net, self._get_compute(), self._get_offload())
            patcher.on_detach = self._drop
            self._loaded = Loaded(model, patcher)
            self._key = key
        return self._loaded

    def _drop(self, patcher: ModelPatcher) -> None:
        if self._loaded is not None and self._loaded.patcher is patcher:
            self._loaded = None


class _NotifyingPatcher(ModelPatcher):  # type: ignore[misc]
    """A patcher that calls ``on_detach`` when weights are unloaded."""

    on_detach: Callable[[ModelPatcher], None] | None = None

    def detach(self, unpatch_all: bool = True) -> Any:
        out = super().detach(unpatch_all)
        if self.on_detach is not None:
            self.on_detach(self)
        return out
