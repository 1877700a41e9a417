"""CUDA tensors without a GPU: tensors that report device "cuda:0",
check every operation for mixed devices, and compute on the CPU.

Code that branches on values (acceptance, rejection) runs as on a GPU, which meta and fake tensors do not allow. What is
checked: an operation on tensors of two devices, NumPy access to a CUDA tensor, types that the CPU's operation refuses,
and values that a CUDA device would have to send to the host. What is not checked: kernels, their speed and their
memory.

A CPU build of PyTorch refuses to index a tensor of device "cuda". There the same tensors can report device "meta",
which suffices to count what the host waits for; see ``waits.py``.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA, META = torch.device("cuda", 0), torch.device("meta")
ROOT = Path(__file__).resolve().parents[2]
# Operations that may take tensors of the host beside those of a GPU: copies, and indices.
_MIXED = ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_")
# Function of the package that copies to a device without the host waiting.
PINNING = "to_device"
# Operations that send a value to the host.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")


class CUDATensor(torch.Tensor):
    """A tensor that reports the pretended device and keeps its values in ``host``, a CPU tensor."""

    host: torch.Tensor
    pretended: ClassVar[torch.device] = CUDA

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "CUDATensor":
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=cls.pretended,
        )
        out.host = host
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CUDATensor({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError("a CUDA tensor cannot be pinned")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a pretended CUDA tensor is used outside of pretended_cuda()")


# Arguments of an operation are nested in tuples, lists and one dict
# only, so that these take a fifth of the time of PyTorch's own.


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from _tensors(x)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _mapped(function: Any, tree: Any) -> Any:
    """The arguments or results of an operation, with ``function`` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(function, x) for x in tree])
    if isinstance(tree, dict):
        return {key: _mapped(function, x) for key, x in tree.items()}
    return tree


class _Device(TorchDispatchMode):
    """Runs operations on CUDA tensors, and creates them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # In inference mode an operation that is made of others ("to",
        # "item") comes as it is. Its parts are what makes the host wait.
        if torch.is_inference_mode_enabled():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        name = func._schema.name.split("::")[1]
        tensors = list(_tensors((args, kwargs)))
        cuda = [x for x in tensors if isinstance(x, CUDATensor)]
        asked = kwargs.get("device")
        target = asked or (CUDATensor.pretended if cuda else torch.device("cpu"))
        if name == "copy_":
            target = args[0].device
        if cuda and name not in _MIXED:
            others = [x for x in tensors if not isinstance(x, CUDATensor) and x.ndim]
            if others:
                raise RuntimeError(
                    f"{name}: expected all tensors on {CUDATensor.pretended}, found one on {others[0].device}"
                )
        self._count(name, func, args, kwargs, cuda, torch.device(target))
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        real_args, real_kwargs = _mapped(lambda x: x.host if isinstance(x, CUDATensor) else x, (args, kwargs))
        with unset_fake_temporarily():
            out = func(*real_args, **real_kwargs)
        if func._schema.is_mutable and func._schema.returns and name != "_index_put_impl_":
            written = func._schema.returns[0].alias_info
            if written is not None and written.is_write:
                return args[0] if "out" not in kwargs else kwargs["out"]
        if torch.device(target).type != CUDATensor.pretended.type:
            if name == "_to_copy" and cuda and out is real_args[0]:
                out = out.clone()
            return out
        with torch.inference_mode(False):  # views of subclasses need version counters
            return _mapped(CUDATensor, out)

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, cuda: list[Any], target: torch.device) -> None:
        """Add what makes the host wait for the device, by the line of the package that asks for it."""
        wait = bool(cuda) and name in _READS
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            if isinstance(source, CUDATensor):  # to the host
                wait = target.type == "cpu"
            elif target.type == CUDATensor.pretended.type:  # from memory that is not pinned
                wait = source.ndim > 0 and not getattr(source, "pinned", False) and not _pinned_by_the_package()
        if cuda and name in ("index", "index_put_", "index_put", "_index_put_impl_"):
            wait = any(i is not None and (i.dtype == torch.bool or not isinstance(i, CUDATensor)) for i in args[1])
        if cuda and name == "repeat_interleave":
            wait = kwargs.get("output_size") is None
        if wait:
            self.waits[f"{name} {_caller()}"] += 1


def _pinned_by_the_package() -> bool:
    """Whether the present copy is the package's own from pinned memory, which it makes on device "cuda" only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == PINNING and CUDATensor.pretended != CUDA:
            return True
        frame = frame.f_back
    return False


def _caller() -> str:
    """File and line of the package from which the present operation was called."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            inside = file.relative_to(ROOT)
            if "tests" not in inside.parts and "site-packages" not in inside.parts:
                return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy that counts as pinned."""
    out = self.clone()
    out.pinned = True  # type: ignore[attr-defined]
    return out


def _by_copy(function: Any) -> Any:
    """``torch.tensor`` or ``torch.as_tensor``, which make meta tensors without asking the mode, as
    a copy that asks it.
    """

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = function(data, **kwargs)
        return out if device is None else out.to(device)

    return made


def _event(*args: Any, **kwargs: Any) -> SimpleNamespace:
    """A CUDA event; its times are zero."""
    return SimpleNamespace(record=lambda *_: None, synchronize=lambda: None, elapsed_time=lambda other: 0.0)


_NAMES = ("Event", "synchronize", "current_stream", "reset_peak_memory_stats", "max_memory_allocated")


def _causal_lower_right(*size: int) -> Any:
    with _disable_current_modes():
        return _mask(*size)


_mask = bias.causal_lower_right
_MADE = {name: _by_copy(getattr(torch, name)) for name in ("tensor", "as_tensor")}
# Selection of an attention kernel by the properties of the GPU; the mask is then materialised.
_KERNELS = {
    "can_use_flash_attention": lambda *a: False,
    "can_use_efficient_attention": lambda *a: False,
    "_raise_kernel_warnings": lambda *a: None,
    "causal_lower_right": _causal_lower_right,
}


@contextmanager
def pretended_cuda(device: torch.device = CUDA) -> Iterator[Counter[str]]:
    """A device in this block, which tensors report as ``device``; yields
    a counter of what makes the host wait for it, by operation and line.
    """
    fakes = (_event, lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: 0)
    cuda = dict(zip(_NAMES, fakes, strict=True))
    mode = _Device()
    owners = (
        (bias, _KERNELS),
        (torch.cuda, cuda),
        (torch.Tensor, {"pin_memory": _pin_memory}),
        (torch, _MADE),
        (CUDATensor, {"pretended": device}),
    )
    with ExitStack() as stack:
        for owner, replacements in owners:
            stack.enter_context(patch.multiple(owner, **replacements))
        # With a fake mode PyTorch does not initialise CUDA, which this machine may not have.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(mode).waits


def to_cuda(net: nn.Module, dtype: torch.dtype | None = None, keep: tuple[str, ...] = ()) -> nn.Module:
    """Move a module's parameters and buffers to the pretended device, in place.

    Args:
        net: the module.
        dtype: of floating-point parameters; None: as they are.
        keep: parts of the names of parameters that keep their type.
    """
    for prefix, module in net.named_modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None or isinstance(value, CUDATensor):
                    continue
                host = value.detach()
                if dtype is not None and host.is_floating_point() and not any(k in f"{prefix}.{name}" for k in keep):
                    host = host.to(dtype)
                moved = CUDATensor(host)
                moved._is_param = table is module._parameters  # type: ignore[attr-defined]
                table[name] = moved  # type: ignore[assignment]
    return net
