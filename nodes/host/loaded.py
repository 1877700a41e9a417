"""Models on sockets, and their places on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...errors import OfFastAR, printable
from ...networks.speed import PLAIN
from ...reports.record import dtype_of
from . import queue
from .devices import get_compute_device, get_offload_device
from .memory import load_weights, make_patcher

# Images of a batch that a preview shows.
MOST_IMAGES = 4
# In ``Loaded.parts`` of a de-tokenizer: the TA-Tok that reads semantic codes.
TA_TOK = "ta_tok"


class Model(Protocol):
    """A network with what is known about it; see ``networks``."""

    @property
    def net(self) -> nn.Module: ...


M = TypeVar("M", bound=Model)


@dataclass(eq=False)
class Loaded(OfFastAR, Generic[M]):
    """Value of a model socket. It owns the patchers, because ComfyUI's list of loaded models holds no reference."""

    kind: ClassVar[str] = "model"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    model: M
    # Moves the weights of ``net``, or of the first of the parts of a MAR or BitDance.
    patcher: ModelPatcher
    # The FastARVAE of the same loader, for live previews; None without one. Not typed, because vae.py imports this
    # module.
    vae: Any = None
    # Further networks of the same loader by name. Each has its own patcher and is on the device only while needed.
    parts: Mapping[str, Loaded[Any]] = field(default_factory=dict)
    # Settings of the model's file, for presets.
    recommended: Mapping[str, Any] = field(default_factory=dict)
    # For the model's other parts.
    further: Sequence[ModelPatcher] = ()
    # How the model runs, a choice of the loader.
    speed: str = ""

    def __str__(self) -> str:
        """For people: what ComfyUI's Preview as Text shows."""
        nets = getattr(self.model, "parts", {"": self.model.net}).values()
        count = sum(weight.numel() for net in nets for weight in net.parameters())
        name = printable(getattr(self.model, "name", ""))
        return f"The model {name}, with {count:,} parameters in {dtype_of(self.model.net)}."

    @staticmethod
    def of(
        model: M,
        vae: Any = None,
        parts: Mapping[str, Loaded[Any]] | None = None,
        recommended: Mapping[str, Any] | None = None,
        speed: str = "",
    ) -> Loaded[M]:
        """Place a model under ComfyUI's memory management: its parts one by one."""
        compute = get_compute_device()
        offload = get_offload_device()

        nets = list(getattr(model, "parts", {"": model.net}).values())
        patchers: list[ModelPatcher] = []
        for net in nets:
            patchers.append(make_patcher(net, compute, offload, speed or PLAIN))

        return Loaded(
            model,
            patchers[0],
            vae,
            parts=parts or {},
            recommended=recommended or {},
            further=patchers[1:],
            speed=speed,
        )

    @property
    def patchers(self) -> list[ModelPatcher]:
        """For all parts of the model; not of the decoder, and not of ``parts``."""
        return [self.patcher, *self.further]

    # Names that core reads.

    def get_models(self) -> list[ModelPatcher]:
        """All patchers except the decoder's, which has its own socket.

        ComfyUI marks them as in use by the prompt that runs, and takes pinned memory from other models first.
        """
        found = list(self.patchers)
        for part in self.parts.values():
            found += part.patchers
        return found

    def is_dynamic(self) -> bool:
        """Whether DynamicVRAM manages its first part, the transformer: core then keeps the cached result.

        A diffusion head beside it has few weights, which are loaded before the run.
        """
        return self.patcher.is_dynamic()


def to_device(
    loaded: Loaded[Any], memory: float, latents: tuple[int, int, int, int], others: Sequence[ModelPatcher] = ()
) -> Any:
    """Load a model and other networks with ``memory`` bytes free to work in.

    The decoder is loaded too, if there are previews of ``latents`` [B, C, h, w]: if they are wanted, and the device can
    hold the decoder beside the rest. Otherwise weights would have to stay in system memory for the sake of previews.

    Returns:
        The FastARVAE of the previews; None without previews.
    """
    patchers = list(dict.fromkeys([*loaded.patchers, *others]))

    vae = loaded.vae
    if vae is not None and queue.previews_wanted():
        shown = min(MOST_IMAGES, latents[0])
        decoding = shown * vae.memory_used_decode(latents, vae.vae_dtype)

        together = list(dict.fromkeys([*patchers, vae.patcher]))
        weights = sum(patcher.model_size() for patcher in together)
        if weights + memory + decoding <= mm.get_total_memory(loaded.patcher.load_device):
            load_weights(together, memory + decoding)
            return vae

    load_weights(patchers, memory)
    return None


def load_to_device(loaded: Loaded[Any], memory: float) -> None:
    """Load a model without previews (a text encoder, say) to its device, with ``memory`` bytes free to work in."""
    load_weights([loaded.patcher], memory)


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
        if self._loaded is not None and self._key == key:
            return self._loaded

        self._loaded = None  # frees memory before the next model is loaded
        model = load()

        patcher = make_patcher(model.net, self._get_compute(), self._get_offload())
        patcher.add_callback(CallbacksMP.ON_DETACH, self._drop)
        self._loaded = Loaded(model, patcher)
        self._key = key
        return self._loaded

    def _drop(self, patcher: ModelPatcher, unpatch_all: bool) -> None:
        if self._loaded is None or self._loaded.patcher is not patcher:
            return

        # ComfyUI reads the patcher again after this call, in a loop over its records. If it were freed here, ComfyUI
        # would remove its record from the list within that loop. So the record holds it until ComfyUI drops the record.
        for record in mm.current_loaded_models:
            if record.model is patcher:
                record.fastar_unloaded = self._loaded
        self._loaded = None
