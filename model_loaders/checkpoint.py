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
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor, nn

from ..errors import UserError, first_line
from . import archive
from .wording import list_names, printable, shape_text, some

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of models, on a CPU: int8 weights in the blocks, see networks/int8.py; everything else is fp32.
INT8 = "int8"

# Keys under which training scripts store weights, in order of preference: papers evaluate the EMA weights.
_NESTS = ("model_ema", "ema", "model", "module", "state_dict", "sd")
_ZIP, _LEGACY = archive.ZIP, archive.LEGACY
_HEADER_LIMIT = 25_000_000  # bytes; a header with Tar's tokenizer has 12 MB
_MAX_TENSORS = 100_000
_SMALL = 1 << 25  # bytes of a safetensors file that is read at once
_LONGEST_AXIS = (1 << 31) - 1
UNCHANGED = "get an unchanged copy of the file"
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])

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
        state: parameter names to CPU tensors in the file's dtype, possibly memory-mapped.
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
        """A number from the metadata.

        Args:
            key: the entry's name.
            default: returned if the entry is missing.
            low, high: inclusive range.
            kind: ``int`` or ``float``.

        Raises:
            UserError: the entry is not a number, or out of range.
        """
        text = self.metadata.get(key)
        if text is None:
            return default
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise self.range_error(f"says {key} = {printable(text)} in its metadata", low, high, kind is int)
        return value

    def range_error(self, found: str, low: float, high: float, whole: bool) -> UserError:
        """The error for a number that is invalid or out of range."""
        noun = "a whole number" if whole else "a number"
        return self.error(f"{found}, which must be {noun} from {low:g} to {high:g}")

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
    path = Path(path)
    if _format(path, field) == "safetensors":
        state, metadata = _read_safetensors(path, field, skip)
    else:
        state, metadata = _tensors(_read_pickled(path, field), path, field)
    if skip is not None:
        state = {name: tensor for name, tensor in state.items() if not skip(name)}
    if not state:
        raise UserError(f"{field}: {path.name} holds no tensors; choose a file with a model's weights")
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    file = Checkpoint(state, metadata, path, field)
    if len(state) > _MAX_TENSORS:
        raise file.error(f"holds {len(state)} tensors, more than the limit of {_MAX_TENSORS}", "choose another file")
    wrong = next((name for name, t in state.items() if not all(1 <= n <= _LONGEST_AXIS for n in t.shape)), None)
    if wrong is not None:
        raise file.error(
            f"holds a tensor that is empty or too large ({printable(wrong)} of {shape_text(state[wrong])} numbers)"
        )
    return file


def read_metadata(path: str | Path) -> dict[str, str]:
    """Text entries of a safetensors header, without reading the weights; {} for any other file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT or file.read(1) != b"{":
                return {}
            found = json.loads(b"{" + file.read(length - 1)).get("__metadata__", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _format(path: Path, field: str) -> str:
    """Detect the format, "safetensors" or "pickled", from the first bytes."""
    if not os.path.exists(path):  # Path.exists can raise
        raise UserError(f"{field}: there is no file {path}; put it there or choose another")
    if os.path.isdir(path):
        raise UserError(f"{field}: {path} is a folder; choose the weight file in it")
    if not os.path.isfile(path):
        raise UserError(f"{field}: {path} is no regular file; choose a weight file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as e:
        raise UserError(f"{field}: {path} cannot be read ({e.strerror}); check its permissions") from e
    if not head:
        raise UserError(f"{field}: {path.name} is empty (0 bytes); get the file again")
    if head.startswith((_ZIP, _LEGACY)):
        return "pickled"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and length <= _HEADER_LIMIT:
        if length + 8 > size:
            raise UserError(f"{field}: {path.name} is cut short within its header; get the file again")
        return "safetensors"
    raise UserError(f"{field}: {path.name} is {_describe(head)}; choose a .safetensors file or a torch checkpoint")


def _describe(head: bytes) -> str:
    """What an unsupported file is, for the message."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights themselves"
    if head.lstrip()[:1] == b"<":
        return "a web page, not weights"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"\x80"):
        return "a bare Python pickle, which may hold code and is not opened"
    if head.isascii() and b"\0" not in head:
        return "a text file, not weights"
    return "no weight file of a known format"


def _read_safetensors(
    path: Path, field: str, skip: Callable[[str], bool] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    with path.open("rb") as header:
        length = int.from_bytes(header.read(8), "little")
        count = header.read(length).count(b'"data_offsets"')
    if count > _MAX_TENSORS:
        raise UserError(
            f"{field}: {path.name} holds {count} tensors, more than the limit of {_MAX_TENSORS}; choose another file"
        )
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if skip is None or not skip(name)]
            metadata = dict(file.metadata() or {})
            if path.stat().st_size > _SMALL:
                return {name: file.get_tensor(name) for name in names}, metadata
        # get_tensor of safetensors 0.4 to 0.8 never frees two integers a tensor, which adds up where files are loaded again and again.
        tensors = load(path.read_bytes())
        return {name: tensors[name] for name in names}, metadata
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        raise UserError(f"{field}: {path.name} is damaged or cut short ({first_line(e)}); {UNCHANGED}") from e


def _read_pickled(path: Path, field: str) -> object:
    if _TORCH < (2, 6):
        # Older weights-only unpicklers can be made to execute code (CVE-2025-32434).
        raise UserError(
            f"{field}: {path.name} is a pickled checkpoint, which torch {torch.__version__} cannot read safely; "
            "use a .safetensors version of it, or torch 2.6 or newer"
        )
    try:
        archive.check(path)
    except archive.HoldsCode as e:
        raise _holds_code(path, field, str(e)) from e
    except (archive.Refused, OSError) as e:
        raise UserError(f"{field}: {path.name} {e}; {UNCHANGED}") from e
    with path.open("rb") as file:
        zipped = file.read(4) == _ZIP
    # torch.load trusts the extension ".safetensors" of a path, and maps only files given by path.
    mapped = zipped and path.suffix != ".safetensors"
    try:
        with torch.serialization.safe_globals([argparse.Namespace, _EasyDict]), path.open("rb") as file:
            source = str(path) if mapped else file
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as e:
        named = re.search(r"GLOBAL (\S+)", str(e))
        raise _holds_code(path, field, named[1] if named else "objects torch does not trust") from e
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        raise UserError(f"{field}: {path.name} is damaged or no checkpoint ({first_line(e)}); {UNCHANGED}") from e


def _is_plain(value: object) -> bool:
    """Whether a value is None, a text, or a finite number of at most 64 bits."""
    return value is None or isinstance(value, str) or isinstance(value, (bool, int, float)) and abs(value) < 1 << 63


def _holds_code(path: Path, field: str, name: str) -> UserError:
    return UserError(
        f"{field}: {path.name} holds more than numbers ({printable(name)}); that could be code, so nothing of it was loaded: "
        "use a .safetensors version of it"
    )


def _tensors(found: Any, path: Path, field: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of an unpickled object.

    Raises:
        UserError: it is not a dictionary, or its tensors claim more bytes than the file has.
    """
    metadata: dict[str, str] = {}
    for _ in range(len(_NESTS)):  # bounded: a pickled dictionary may contain itself
        if not isinstance(found, Mapping):
            raise UserError(
                f"{field}: {path.name} holds a {type(found).__name__}, not a dictionary of weights; choose another file"
            )
        inner = next((found[key] for key in _NESTS if isinstance(found.get(key), Mapping) and found[key]), None)
        if inner is None:
            break
        arguments = found.get("args") if inner is found.get("sd") else None
        if isinstance(arguments, Mapping):
            plain = {k: v for k, v in arguments.items() if isinstance(k, str) and _is_plain(v)}
            metadata["args"] = json.dumps(plain)
        found = inner
    state = {k: v.detach() for k, v in found.items() if isinstance(k, str) and isinstance(v, Tensor)}
    # Zero strides turn a few bytes into gigabytes. The factor 2 allows for shared weights.
    if sum(t.numel() * t.element_size() for t in state.values()) > 2 * path.stat().st_size:
        raise UserError(f"{field}: {path.name} claims more weights than it holds bytes; get the original file")
    return state, metadata


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
        if device.type != "cpu":
            raise UserError(f"dtype: int8 weights are for a CPU, and the models run on {device}; choose auto.")
        if not hasattr(torch, "_int_mm"):
            raise UserError(f"dtype: PyTorch {torch.__version__} has no int8 product; choose auto.")
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
    except ValueError as e:
        if "unpack" not in str(e):  # an unpacked shape has the wrong number of dimensions
            raise file.error(f"cannot be used as {what}: {first_line(e)}") from e
        raise file.error(f"does not fit {what}: its weights are misshaped") from e
    except (IndexError, ZeroDivisionError, OverflowError, RuntimeError, TypeError) as e:
        raise file.error(f"does not fit {what}: its weights are misshaped") from e


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
        UserError: names missing, unexpected or misshaped (at most ten are listed), or weights that are not finite
            floating-point numbers.
    """
    label, state = f"{file.field}: {file.path.name}", file.state
    expected = net.state_dict()
    wrong = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "misshaped": [name for name, t in expected.items() if name in state and state[name].shape != t.shape],
    }
    if any(wrong.values()):
        raise UserError(f"{label} does not fit {what}: {list_names(wrong, expected, state)}; {UNCHANGED}")
    invalid = [n for n, t in state.items() if not t.is_floating_point() or t.layout is not torch.strided]
    if invalid:
        kind = str(state[invalid[0]].dtype).removeprefix("torch.")
        raise UserError(f"{label} holds {kind} and no plain weights in {some(invalid)}; get an fp32 or fp16 file")
    loaded = {}
    for name, tensor in state.items():
        target = torch.float32 if name.startswith(tuple(fp32)) and dtype is not None else dtype
        loaded[name] = tensor.to(dtype=target, copy=True).contiguous()
    broken = [name for name, tensor in loaded.items() if not _finite(tensor)]
    if broken and all(_finite(state[name]) for name in broken):
        raise UserError(f"{label} has weights too large for {dtype} in {some(broken)}; choose dtype bf16 or fp32")
    if broken:
        raise UserError(f"{label} holds NaN or infinite weights in {some(broken)}; get the file again")
    net.load_state_dict({name: tensor.to(device) for name, tensor in loaded.items()}, strict=True, assign=True)
    return net.eval().requires_grad_(False)


def _finite(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    if tensor.element_size() == 1:  # aminmax does not support fp8
        tensor = tensor.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
