"""Reading of weight files and Hugging Face model folders, and strict loading into a network.

The format is detected from the first bytes, not from the extension. Pickled checkpoints are read by torch's weights-only unpickler,
which executes no code from the file.

Arguments that all loaders share: ``path``, see :func:`read`; ``dtype``, see :func:`.families.choose_dtype`; ``device``, of the weights. All
raise a UserError if a file is missing, damaged or of another network, if its weights do not fit, or if its metadata is invalid. The shape
of a network is derived from its weights. Networks are in eval mode, without gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
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
from .networks.ops import limit_packing, quantize

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
_SHARD = re.compile(r"-of-(\d+)\.\w+$")
MAX_JSON_BYTES = 32_000_000  # a tokenizer with 65,536 image codes has 12 MB
_MAX_DIGITS = 25

N = TypeVar("N", bound=nn.Module)

# Official training scripts store their arguments in these classes, which the unpickler finds by module and name: argparse's Namespace,
# and easydict's EasyDict, in whose place it creates an ordered dictionary.
_EasyDict = type("EasyDict", (), {"__module__": "easydict", "__new__": lambda cls, *_: OrderedDict()})


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Contents of a weight file."""

    state: dict[str, Tensor]  # parameter names to CPU tensors in the file's dtype, memory-mapped
    # Text entries of a safetensors header; of a pickle with ``sd`` and ``args`` (Tar) the entry "args", the scalar arguments as JSON.
    metadata: dict[str, str]
    path: Path  # the file, or the folder of its shards
    field: str = "checkpoint"  # name of the input that selected the file; messages begin with it
    what: str = "a network"  # the kind of network it is read for ("a MAR"), for messages

    @property
    def folder(self) -> Path:
        """Folder of the file."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def stem(self) -> str:
        """Name of a single file without extension; "" for a model folder."""
        return "" if self.path.is_dir() else self.path.stem

    def error(self, found: str, remedy: str = "get an unchanged copy of the file") -> UserError:
        """The error "field: file name found; remedy"."""
        return UserError(f"{self.field}: {self.path.name} {found}; {remedy}")

    def filter(self, keep: Callable[[str], bool]) -> Checkpoint:
        """The weights whose names satisfy ``keep``."""
        return replace(self, state={name: t for name, t in self.state.items() if keep(name)})

    def number(self, key: str, default: Any, low: float, high: float, settings: Mapping[str, Any] | None = None) -> Any:
        """A number from ``low`` to ``high`` of a JSON configuration (None: of the metadata), a whole one if ``low`` is an int; ``default``
        if it is missing or null, and a UserError if it is no such number."""
        value, kind = (self.metadata if settings is None else settings).get(key), type(low)
        if value is None:
            return default
        try:
            number: Any = kind(value) if settings is None else value
            fits = low <= number <= high and not isinstance(value, bool) and not (kind is int and number % 1)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            noun = "a whole number" if kind is int else "a number"
            stated = str(value)[:40] if settings is None else shown(value)
            raise self.error(f"states {key} = {stated}, which must be {noun} from {low:g} to {high:g}")
        return kind(number)

    def text(self, key: str, default: str) -> str:
        """A text from the metadata: printable characters in one line, at most 80; ``default`` if there are none."""
        text = "".join(c for c in " ".join(self.metadata.get(key, "").split()) if c.isprintable())
        return text[:80] or default

    @property
    def name(self) -> str:
        """Display name: the metadata entry ``name``, else the file's stem, or the folder's name where that says nothing."""
        telling = self.stem not in ("", "model", "checkpoint-last") or not self.folder.name
        return self.text("name", self.stem if telling else self.folder.name)

    def settings(self, key: str, beside: bool = False) -> dict[str, Any]:
        """A JSON object from the metadata, or ``beside`` a file without a configuration in its metadata, from ``<key>.json``; {} if there
        is none. A UserError if it is not a JSON object."""
        if key in self.metadata:
            return parse_json(self.metadata[key], f"the entry {key} in {self.path.name}", self.field)
        beside = beside and "config" not in self.metadata
        return read_json(self.folder / f"{key}.json", self.field) if beside else {}


def read(
    path: str | Path, field: str = "checkpoint", skip: Callable[[str], bool] | None = None, shards: Sequence[Path] = ()
) -> Checkpoint:
    """Read a weight file without executing code from it.

    ``path`` is a safetensors file, or one written by ``torch.save``: flat, or nested under one of the names :data:`_NESTS`. A ``module.``
    prefix common to all names is removed. ``skip``: whether a weight of this name is left out; in safetensors it is not read at all.
    ``shards``: the files that ``path``, a folder, stands for. A UserError if a file is missing, damaged, of another format, or holds other
    objects than plain values and tensors, no tensor, more than 100,000, or an empty one, or if two shards hold the same weight.
    """
    whole = Checkpoint({}, {}, Path(path), field)
    for shard in shards or [whole.path]:
        file = Checkpoint({}, {}, shard, field)
        state, metadata = _read_pickled(file) if _is_pickled(file) else _read_safetensors(file, skip)
        state = {name: tensor for name, tensor in state.items() if not (skip and skip(name))}
        if not state and skip is None:
            raise file.error("holds no tensors", "choose a file with a model's weights")
        if all(name.startswith("module.") for name in state):
            state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        for name, tensor in state.items():
            if not all(1 <= n <= _LONGEST_AXIS for n in tensor.shape):
                raise file.error(f"holds a tensor that is empty or too large ({name[:80]}: {_shape(tensor)})")
        if twice := state.keys() & whole.state.keys():
            raise file.error(f"holds {min(twice)[:80]}, which another shard holds too", "get the shards again")
        whole.state.update(state)
        whole.metadata.update(metadata)
    return whole


def read_metadata(path: str | Path) -> dict[str, str]:
    """Text entries of a safetensors header; {} for any other file."""
    file = Checkpoint({}, {}, Path(path))
    try:
        if _is_pickled(file):
            return {}
        with _opened(file) as opened:
            return dict(opened.metadata() or {})
    except UserError:
        return {}


def _is_pickled(file: Checkpoint) -> bool:
    """Whether a file was written by ``torch.save`` rather than safetensors; a UserError if it is neither."""
    if not os.path.exists(file.path):  # Path.exists can raise
        raise UserError(f"{file.field}: there is no file {file.path}; put it there or choose another")
    if not os.path.isfile(file.path):
        raise file.error("is a folder or no regular file", "choose a weight file")
    try:
        with file.path.open("rb") as opened:
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


@contextmanager
def _opened(file: Checkpoint) -> Iterator[Any]:
    """A safetensors file, opened by the library; a UserError in place of every exception in the block."""
    with file.path.open("rb") as raw:  # the library takes kilobytes for each tensor of a header
        count = raw.read(8 + int.from_bytes(raw.read(8), "little")).count(b'"data_offsets"')
    if count > _MAX_TENSORS:
        raise file.error(f"holds {count} tensors, more than the limit of {_MAX_TENSORS}", "choose another file")
    try:
        with safe_open(str(file.path), framework="pt", device="cpu") as opened:
            yield opened
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        raise file.error(f"is damaged or cut short ({first_line(e)})") from e


def _read_safetensors(file: Checkpoint, skip: Callable[[str], bool] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    with _opened(file) as opened:
        names = [name for name in opened.keys() if not (skip and skip(name))]
        return {name: opened.get_tensor(name) for name in names}, dict(opened.metadata() or {})


def _read_pickled(file: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of a file of ``torch.save``; a UserError if it holds anything else, or claims more than its bytes."""
    path = file.path
    if _TORCH < (2, 6):  # older weights-only unpicklers can be made to execute code (CVE-2025-32434)
        why = f"is a pickled checkpoint, unsafe to read with torch {torch.__version__}"
        raise file.error(why, "use torch 2.6 or a .safetensors file")
    if path.suffix == ".safetensors":  # torch does not map such files
        raise file.error("is a torch checkpoint and no safetensors file", "rename it to .pt")
    try:
        archive.check(path)
        with torch.serialization.safe_globals([argparse.Namespace, _EasyDict]):
            found: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
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


def weight_files(path: Path, field: str, what: str) -> list[Path]:
    """The weight files of a model folder, or of the folder of a shard, or the file itself; ``what`` is the kind of network, for messages.

    A single file is preferred to shards, and safetensors to pickles. A UserError if there are none, or not all shards.
    """
    if not os.path.exists(path):  # Path.exists can raise
        raise UserError(f"{field}: there is no file or folder {path}; put it there or choose another")
    folder = path.parent if _SHARD.search(path.name) else path
    if not os.path.isdir(folder):
        return [path]
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return [member(folder / f"{stem}.{suffix}", field)]
        shards = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            match = _SHARD.search(shards[0].name)
            if match and len(shards) != int(match[1]):
                found = f"{folder} holds {len(shards)} of {int(match[1])} shards"
                raise UserError(f"{field}: {found}; put all of them there")
            return [member(shard, field) for shard in shards]
    raise UserError(f"{field}: {folder} holds no model.safetensors or shards; choose a folder or file with {what}")


def member(path: Path, field: str) -> Path:
    """A file of a model folder; a UserError if it is a link out of it, unless within Hugging Face's cache."""
    folder, target = path.parent.resolve(), path.resolve()
    cached = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if folder not in target.parents and not cached:
        raise UserError(f"{field}: {path.name} in {path.parent} is a link out of that folder; put the file there")
    return path


def read_text(path: Path, field: str) -> str:
    """The text of a file of a model folder; a UserError if it is unreadable, too large, or a link out of the folder."""
    member(path, field)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        where = f"{path.name} in {path.parent}"
        raise UserError(f"{field}: {where} cannot be read ({first_line(e)}); get the file again") from e


def read_json(path: Path, field: str) -> dict[str, Any]:
    """A JSON object from a file of a model folder; {} if the file does not exist. Errors as :func:`parse_json`."""
    return parse_json(read_text(path, field), f"{path.name} in {path.parent}", field) if path.is_file() else {}


def parse_json(text: str, where: str, field: str) -> dict[str, Any]:
    """A JSON object of finite numbers with at most 25 digits, else a UserError; Python's parser also accepts NaN and endless integers."""

    def integer(text: str) -> int:
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"it holds a number of {len(text)} digits")
        return int(text)

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"it holds the number {text[:20]}")
        return float(text)

    try:
        value = json.loads(text, parse_int=integer, parse_float=finite, parse_constant=finite)
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        return value
    except (ValueError, RecursionError) as e:
        raise UserError(f"{field}: {where} cannot be read ({first_line(e)}); get the file again") from e


def shown(value: Any) -> str:
    """A value of a JSON file for a message: a text in quotes, so that it differs from a number."""
    if isinstance(value, (dict, list)):  # possibly too deep to be written out
        return "a dictionary" if isinstance(value, dict) else "a list"
    return repr(value)[:40] if isinstance(value, str) else json.dumps(value)[:40]


@contextmanager
def misfits(file: Checkpoint) -> Iterator[None]:
    """Report the errors that missing, misshaped or contradictory weights of ``file`` cause in the block as a UserError."""
    try:
        yield
    except UserError:
        raise
    except KeyError as e:
        raise file.error(f"does not fit {file.what}: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, RuntimeError, TypeError) as e:
        raise file.error(f"does not fit {file.what}, a weight is misshaped ({first_line(e)})") from e


def load_strictly(
    file: Checkpoint,
    make: Callable[[], N],
    *,
    dtype: torch.dtype = torch.float32,
    fp32: Collection[str] = (),
    device: str | torch.device = "cpu",
    int8: bool = False,
) -> N:
    """A network in eval mode, without gradients, with copies of all weights of a file.

    ``make`` constructs it, on the device "meta", where weights take no memory. ``fp32``: name prefixes of weights that are fp32 regardless
    of ``dtype``; ``int8``: whether the blocks are rounded to int8. A UserError if names are missing, unexpected or misshaped, or weights
    are no finite floating-point numbers.
    """
    with misfits(file), torch.device("meta"):
        net = make()
    state, expected, loaded = file.state, net.state_dict(), {}
    both = [(name, _shape(state[name]), _shape(t)) for name, t in expected.items() if name in state]
    wrong = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "misshaped": [f"{name} is {found}, not {wanted}" for name, found, wanted in both if found != wanted],
    }
    if any(wrong.values()):
        some = {kind: ", ".join(names[:3])[:240] + ", ..." * (len(names) > 3) for kind, names in wrong.items()}
        listed = [f"{len(names)} {kind} ({some[kind]})" for kind, names in wrong.items() if names]
        raise file.error(f"does not fit {file.what}: {', '.join(listed)}")
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise file.error(f"holds {kind} and no plain weights in {name[:80]}", "get an fp32 or fp16 file")
        target = torch.float32 if name.startswith(tuple(fp32)) else dtype
        loaded[name] = tensor.to(device=device, dtype=target, copy=True).contiguous()
        if not _finite(loaded[name]):
            if _finite(tensor):
                raise file.error(f"has weights too large for {dtype} in {name[:80]}", "choose dtype bf16 or fp32")
            raise file.error(f"holds NaN or infinite weights in {name[:80]}", "get the file again")
    net.load_state_dict(loaded, strict=True, assign=True)
    limit_packing(net)
    return (quantize(net) if int8 else net).eval().requires_grad_(False)


def _shape(tensor: Tensor) -> str:
    """For example "3x4"."""
    return "x".join(map(str, tensor.shape)) or "a single number"


def _finite(tensor: Tensor) -> bool:
    if tensor.element_size() == 1:  # aminmax does not support fp8
        tensor = tensor.float()
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
