"""Reading of weight files, and strict loading into a network.

The format is detected from the first bytes, not from the extension. Pickled checkpoints are read by torch's weights-only
unpickler, which executes no code from the file. Besides tensors it accepts the two classes in which official training
scripts store their arguments: ``argparse.Namespace``, and easydict's ``EasyDict``, replaced by an ordered dictionary. Every
problem with a file is reported as :class:`~..errors.UserError`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..errors import UserError, first_line
from . import archive
from .networks.ops import limit_packing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of models, on a CPU: int8 weights in the blocks, see networks/ops.py; everything else is fp32.
INT8 = "int8"
UNCHANGED = "get an unchanged copy of the file"

# Keys under which training scripts store weights, in order of preference: papers evaluate the EMA weights.
_NESTS = ("model_ema", "ema", "model", "module", "state_dict", "sd")
_HEADER_LIMIT = 25_000_000  # bytes; a header with Tar's tokenizer has 12 MB
_MAX_TENSORS = 100_000
_LONGEST_AXIS = (1 << 31) - 1
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
# First bytes of files that are often taken for weights.
_OTHERS = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights themselves",
    b"<": "a web page, not weights",
    b"GGUF": "a GGUF file",
    b"\x80": "a checkpoint in torch's format of before 2020, or a bare pickle, which may hold code",
}

N = TypeVar("N", bound=nn.Module)


class _EasyDict:
    """Placeholder for ``easydict.EasyDict`` during unpickling; creates an ordered dictionary."""

    def __new__(cls, *_: object) -> Any:
        return OrderedDict()


# The unpickler looks classes up by these names.
_EasyDict.__module__, _EasyDict.__qualname__, _EasyDict.__name__ = "easydict", "EasyDict", "EasyDict"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Contents of a weight file.

    Attributes:
        state: parameter names to CPU tensors in the file's dtype, memory-mapped.
        metadata: text entries of a safetensors header. For a pickle with ``sd`` and ``args`` (Tar): the entry "args", the
            scalar arguments as JSON. Otherwise empty.
        path: the file.
        field: name of the input that selected the file; messages begin with it.
    """

    state: dict[str, Tensor]
    metadata: dict[str, str]
    path: Path
    field: str = "checkpoint"

    def error(self, found: str, remedy: str = UNCHANGED) -> UserError:
        """The error "field: file name found; remedy"."""
        return UserError(f"{self.field}: {self.path.name} {found}; {remedy}")

    def filter(self, keep: Callable[[str], bool]) -> Checkpoint:
        """The weights whose names satisfy ``keep``."""
        return replace(self, state={name: t for name, t in self.state.items() if keep(name)})

    def section(self, prefix: str) -> Checkpoint:
        """The weights under a prefix ("vq.", "ta_tok.") of a file with several networks; any other file unchanged."""
        inside = {name.removeprefix(prefix): t for name, t in self.state.items() if name.startswith(prefix)}
        return replace(self, state=inside) if inside else self

    def number(self, key: str, default: Any, low: float, high: float, kind: Callable[[str], Any]) -> Any:
        """A number (``int`` or ``float``) from the metadata, from ``low`` to ``high``; ``default`` if there is none.

        Raises:
            UserError: the entry is not a number, or out of range.
        """
        if key not in self.metadata:
            return default
        try:
            value = kind(self.metadata[key])
        except ValueError:
            value = math.nan
        return self.checked(f"{key} = {self.metadata[key][:40]} in its metadata", value, low, high, kind is int)

    def setting(self, settings: Mapping[str, Any], key: str, default: Any, low: float, high: float) -> Any:
        """A number of a JSON configuration; ``default`` if it is missing or null. A float default accepts any number.

        Raises:
            UserError: the entry is not such a number, or out of range.
        """
        value = settings.get(key)
        if value is None:
            return default
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        return self.checked(
            f"{key} = {str(value)[:40]} in its configuration", number, low, high, not isinstance(default, float)
        )

    def checked(self, stated: str, value: float, low: float, high: float, whole: bool) -> Any:
        """A number from ``low`` to ``high``; ``stated`` describes it in the message.

        Raises:
            UserError: it is out of range, or no whole number.
        """
        if low <= value <= high and not (whole and value % 1):
            return int(value) if whole else float(value)
        noun = "a whole number" if whole else "a number"
        raise self.error(f"states {stated}, which must be {noun} from {low:g} to {high:g}")

    def text(self, key: str, default: str) -> str:
        """A text from the metadata: printable characters in one line, at most 80; ``default`` if missing or empty."""
        text = "".join(c for c in " ".join(self.metadata.get(key, "").split()) if c.isprintable())
        return text[:80] or default

    @property
    def name(self) -> str:
        """Display name: the metadata entry ``name``, or the file's stem; of MAR's ``checkpoint-last.pth`` the folder's name."""
        stem = self.path.stem
        return self.text("name", self.path.parent.name if stem == "checkpoint-last" and self.path.parent.name else stem)


# --------------------------------------------------------------------------------------------------- reading


def read(path: str | Path, field: str = "checkpoint", skip: Callable[[str], bool] | None = None) -> Checkpoint:
    """Read a weight file without executing code from it.

    Args:
        path: a safetensors file, or one written by ``torch.save``: flat, or nested under ``model_ema`` (preferred),
            ``ema``, ``model``, ``module``, ``state_dict`` or ``sd``. A ``module.`` prefix common to all names is removed.
        field: name of the input that selected the file; messages begin with it.
        skip: whether a weight of this name is left out. In safetensors it is not read at all.

    Raises:
        UserError: the file is missing, empty, damaged, of another format, contains objects other than plain values and
            tensors, contains no tensor, more than 100,000, or one that is empty.
    """
    file = Checkpoint({}, {}, Path(path), field)
    pickled = _is_pickled(file)
    state, metadata = _read_pickled(file) if pickled else _read_safetensors(file, skip)
    state = {name: tensor for name, tensor in state.items() if not (skip and skip(name))}
    if not state and skip is None:
        raise file.error("holds no tensors", "choose a file with a model's weights")
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    for name, tensor in state.items():
        if not all(1 <= n <= _LONGEST_AXIS for n in tensor.shape):
            raise file.error(f"holds a tensor that is empty or too large ({name[:80]}: {shape_text(tensor)})")
    return replace(file, state=state, metadata=metadata)


def read_all(files: Sequence[Path], path: Path, field: str, skip: Callable[[str], bool] | None = None) -> Checkpoint:
    """Read the shards of a model as one checkpoint, with the metadata of the first. ``path`` stands for them in messages.

    Raises:
        UserError: see :func:`read`, or two files contain the same weight.
    """
    state: dict[str, Tensor] = {}
    shards = [read(shard, field, skip) for shard in files]
    for shard in shards:
        if twice := state.keys() & shard.state.keys():
            raise shard.error(f"holds {min(twice)[:80]}, which another shard holds too", "get the shards again")
        state.update(shard.state)
    return Checkpoint(state, shards[0].metadata, path, field)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Text entries of a safetensors header, without reading the weights; {} for any other file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except Exception:  # a damaged file can raise any exception
        return {}


def _is_pickled(file: Checkpoint) -> bool:
    """Whether a file was written by ``torch.save`` rather than safetensors, from its first bytes.

    Raises:
        UserError: it is neither, or cannot be read.
    """
    path = file.path
    if not os.path.exists(path):  # Path.exists can raise
        raise UserError(f"{file.field}: there is no file {path}; put it there or choose another")
    if not os.path.isfile(path):
        raise file.error("is a folder or no regular file", "choose a weight file")
    try:
        with path.open("rb") as opened:
            head = opened.read(512)
    except OSError as e:
        raise file.error(f"cannot be read ({e.strerror})", "check its permissions") from e
    if head.startswith(b"PK\x03\x04"):
        return True
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _HEADER_LIMIT:
        return False
    kinds = [kind for start, kind in _OTHERS.items() if head.lstrip().startswith(start)]
    found = kinds[0] if kinds else "no weight file of a known format" if head else "empty (0 bytes)"
    raise file.error(f"is {found}", "choose a .safetensors file or a torch checkpoint")


def _read_safetensors(file: Checkpoint, skip: Callable[[str], bool] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    with file.path.open("rb") as raw:  # the library takes kilobytes for each tensor of a header
        count = raw.read(8 + int.from_bytes(raw.read(8), "little")).count(b'"data_offsets"')
    if count > _MAX_TENSORS:
        raise file.error(f"holds {count} tensors, more than the limit of {_MAX_TENSORS}", "choose another file")
    try:
        with safe_open(str(file.path), framework="pt", device="cpu") as opened:
            names = [name for name in opened.keys() if not (skip and skip(name))]
            return {name: opened.get_tensor(name) for name in names}, dict(opened.metadata() or {})
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        raise file.error(f"is damaged or cut short ({first_line(e)})") from e


def _read_pickled(file: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of a file of ``torch.save``.

    Raises:
        UserError: it is damaged, holds something else than weights and plain values, or claims more bytes than it has.
    """
    path = file.path
    if _TORCH < (2, 6):  # older weights-only unpicklers can be made to execute code (CVE-2025-32434)
        why = f"is a pickled checkpoint, unsafe to read with torch {torch.__version__}"
        raise file.error(why, "use torch 2.6 or a .safetensors file")
    if path.suffix == ".safetensors":  # torch does not map such files
        raise file.error("is a torch checkpoint and no safetensors file", "rename it to .pt")
    try:
        archive.check(path)
        with torch.serialization.safe_globals([argparse.Namespace, _EasyDict]):
            found: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except archive.HoldsCode as e:
        why = f"holds {e}, which may be code, so nothing was loaded"
        raise file.error(why, "use a .safetensors version of it") from e
    except (archive.Refused, OSError) as e:
        raise file.error(first_line(e)) from e
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        raise file.error(f"is damaged or no checkpoint ({first_line(e)})") from e
    metadata: dict[str, str] = {}
    for _ in range(len(_NESTS)):  # bounded: a pickled dictionary may contain itself
        if not isinstance(found, Mapping):
            raise file.error(f"holds a {type(found).__name__}, not a dictionary of weights", "choose another file")
        inner = next((found[key] for key in _NESTS if isinstance(found.get(key), Mapping) and found[key]), None)
        if inner is None:
            break
        arguments = found.get("args")
        if inner is found.get("sd") and isinstance(arguments, Mapping):
            metadata["args"] = json.dumps({k: v for k, v in arguments.items() if isinstance(k, str) and _is_plain(v)})
        found = inner
    state = {k: v.detach() for k, v in found.items() if isinstance(k, str) and isinstance(v, Tensor)}
    # Zero strides turn a few bytes into gigabytes. The factor 2 allows for shared weights.
    if sum(t.numel() * t.element_size() for t in state.values()) > 2 * path.stat().st_size:
        raise file.error("claims more weights than it holds bytes")
    return state, metadata


def _is_plain(value: object) -> bool:
    """Whether a value is None, a text, or a finite number of at most 64 bits."""
    return value is None or isinstance(value, str) or isinstance(value, (bool, int, float)) and abs(value) < 1 << 63


# --------------------------------------------------------------------------------------------------- loading


def choose_dtype(name: str, device: str | torch.device, bf16: bool = False) -> torch.dtype:
    """Resolve the compute dtype of a network.

    Args:
        name: "fp32", "bf16", "fp16"; "int8": fp32, and the loaders round the blocks; or "auto": fp16 on GPUs that compute it
            at full speed, else fp32. "auto" is not bf16 because the first diffusion step multiplies a denoiser's rounding error
            by hundreds (316 at 100 diffusion steps), to an error of 0.15 in fp16 and about 1 in bf16. MAR was also evaluated in
            fp16.
        device: device the network computes on.
        bf16: whether "auto" prefers bf16 on CUDA devices of compute capability 8.0 or higher, for networks that were
            trained and evaluated in bf16 (LlamaGen, T5).

    Raises:
        UserError: unknown name, or int8 on another device than a CPU or without its product in PyTorch.
    """
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    device = torch.device(device)
    if name == INT8:
        if device.type != "cpu" or not hasattr(torch, "_int_mm"):
            raise UserError(
                f"dtype: int8 needs a CPU and its int8 product, and the models run on {device}; choose auto."
            )
        return torch.float32
    if name != "auto":
        raise UserError(f"dtype: {name!r} is not known; choose auto, {', '.join(DTYPES)}, {INT8}")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if bf16 and capability >= (8, 0):
            return torch.bfloat16
        # Before Volta fp16 is not faster than fp32, and on some cards much slower.
        return torch.float16 if capability >= (7, 0) else torch.float32
    return torch.float16 if device.type in ("mps", "xpu") else torch.float32


def without_fp16(name: str, device: str | torch.device, what: str) -> torch.dtype:
    """As :func:`choose_dtype`, for networks whose activations overflow in fp16: "auto" is bf16 or fp32.

    Raises:
        UserError: unknown name, or fp16; ``what`` names the network.
    """
    if name == "fp16":
        raise UserError(f"dtype: fp16 overflows in {what}; choose bf16, fp32 or auto")
    compute = choose_dtype(name, device, bf16=True)
    return torch.float32 if compute == torch.float16 else compute


@contextmanager
def shape_errors(file: Checkpoint, what: str) -> Iterator[None]:
    """Report errors of deriving a network's shape from the weights of ``file``.

    Args:
        what: the kind of network ("a MAR").

    Raises:
        UserError: in place of the errors that missing, misshaped or contradictory weights cause in the block.
    """
    try:
        yield
    except UserError:
        raise
    except KeyError as e:
        raise file.error(f"does not fit {what}: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, RuntimeError, TypeError) as e:
        raise file.error(f"does not fit {what}, a weight is misshaped ({first_line(e)})") from e


def build(file: Checkpoint, what: str, make: Callable[[], N]) -> N:
    """Construct a network on the meta device, where weights take no memory.

    Raises:
        UserError: see :func:`shape_errors`.
    """
    with shape_errors(file, what), torch.device("meta"):
        return make()


def load_strictly(
    net: N,
    file: Checkpoint,
    what: str,
    *,
    dtype: torch.dtype | None = None,
    fp32: Collection[str] = (),
    device: str | torch.device = "cpu",
) -> N:
    """Load all weights of ``file`` into ``net``. If any check fails, ``net`` is left unchanged.

    Args:
        net: the network, on any device; on "meta" the weights are allocated only once.
        file: the weights. They are copied, so the file may change or be deleted afterwards.
        what: the kind of network ("a MAR"), for messages.
        dtype: dtype of the loaded weights; None keeps the file's.
        fp32: name prefixes of weights that are loaded in fp32 regardless of ``dtype``.
        device: device of the loaded weights.

    Returns:
        ``net`` in eval mode, without gradients.

    Raises:
        UserError: names missing, unexpected or misshaped, or weights that are not finite floating-point numbers.
    """
    state, expected = file.state, net.state_dict()
    wrong = [
        _some("missing", [name for name in expected if name not in state]),
        _some("unexpected", [name for name in state if name not in expected]),
        _some(
            "misshaped",
            [
                f"{name} is {shape_text(state[name])}, not {shape_text(t)}"
                for name, t in expected.items()
                if name in state and state[name].shape != t.shape
            ],
        ),
    ]
    if any(wrong):
        raise file.error(f"does not fit {what}: {', '.join(filter(None, wrong))}")
    loaded = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise file.error(f"holds {kind} and no plain weights in {name[:80]}", "get an fp32 or fp16 file")
        target = torch.float32 if name.startswith(tuple(fp32)) and dtype is not None else dtype
        loaded[name] = tensor.to(device=device, dtype=target, copy=True).contiguous()
        if not _finite(loaded[name]):
            if _finite(tensor):
                raise file.error(f"has weights too large for {dtype} in {name[:80]}", "choose dtype bf16 or fp32")
            raise file.error(f"holds NaN or infinite weights in {name[:80]}", "get the file again")
    net.load_state_dict(loaded, strict=True, assign=True)
    limit_packing(net)
    return net.eval().requires_grad_(False)


def shape_text(tensor: Tensor) -> str:
    """For example "3x4"."""
    return "x".join(map(str, tensor.shape)) or "a single number"


def _some(kind: str, names: list[str]) -> str:
    """For example "12 missing (a, b, c, ...)"; "" if there are none."""
    shown = ", ".join(name[:80] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {kind} ({shown})" if names else ""


def _finite(tensor: Tensor) -> bool:
    if tensor.element_size() == 1:  # aminmax does not support fp8
        tensor = tensor.float()
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
