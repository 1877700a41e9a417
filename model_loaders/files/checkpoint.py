"""Reading of weight files and Hugging Face model folders, and strict loading into a network.

The format is detected from the first bytes, not from the extension. Pickled checkpoints are read by torch's
weights-only unpickler, which executes no code from the file.

Arguments that all loaders share: ``path``, see :func:`read`; ``dtype``, see :func:`.kinds.choose_dtype`; ``device``,
of the weights. All raise a UserError if a file is missing, damaged or of another network, if its weights do not fit, or
if its metadata is invalid. The shape of a network is derived from its weights. Networks are in eval mode, without
gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import UserError, amount, first_line
from ...networks.autoencoder import STATED_GROUPS
from ...networks.ops import FAST, TORCH, Operations, blocks_layers, limit_packing, shapes_only
from ...networks.precision import is_finite
from ...networks.quantized import QUANTISED, Format, FourBits, Quantized, format_of, kind_of
from . import archive, mapped
from .formats import INSTEAD, other_format
from .wrappers import AUTO, WEIGHTS, NoWeights, unpack, unwrapped

_HEADER_LIMIT = 25_000_000  # bytes; a header with Tar's tokenizer has 12 MB
_MAX_TENSORS = 100_000
# What systems say if a file cannot be mapped for want of memory: Linux and macOS, and Windows.
_NO_MEMORY = ("Cannot allocate memory", "os error 1455", "WinError 1455", "error code: <1455>")
_UNCHANGED = "get an unchanged copy of the file"
_LONGEST_AXIS = (1 << 31) - 1
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
MAX_JSON_BYTES = 32_000_000  # a tokenizer with 65,536 image codes has 12 MB

# What ComfyUI, where it runs, makes of the weights and the metadata of a file: each weight of its formats of 8 bits
# becomes one Quantized. Elsewhere such files are refused.
gather_quantised: Callable[[Mapping[str, Tensor], Mapping[str, str]], dict[str, Tensor]] | None = None

N = TypeVar("N", bound=nn.Module)

# Official training scripts store their arguments in these classes, which the unpickler finds by module and name:
# argparse's Namespace, and easydict's EasyDict, in whose place it creates an ordered dictionary.
_EasyDict = type("EasyDict", (), {"__module__": "easydict", "__new__": lambda cls, *_: OrderedDict()})


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Contents of a weight file."""

    # Parameter names to CPU tensors in the file's dtype, memory-mapped; a weight of 8 bits with a scale is a Quantized.
    state: dict[str, Tensor]
    # Text entries of a safetensors header; of a pickle with arguments of its training the entry "args", the plain ones
    # as JSON.
    metadata: dict[str, str]
    path: Path  # the file, or the folder of its shards
    field: str = "checkpoint"  # name of the input that selected the file; messages begin with it
    what: str = "a network"  # the kind of network it is read for ("a MAR"), for messages
    averaged: bool = False  # whether the file says that these are averaged (EMA) weights
    notes: list[str] = dataclasses.field(default_factory=list)  # see ``assume``; copies of a checkpoint share it

    @property
    def folder(self) -> Path:
        """Folder of the file."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def stem(self) -> str:
        """Name of a single file without extension; "" for a model folder."""
        return "" if self.path.is_dir() else self.path.stem

    def error(self, found: str, remedy: str = _UNCHANGED) -> UserError:
        """The error "field: file name found; remedy"."""
        return UserError(f"{self.field}: {self.path.name} {found}; {remedy}")

    def filter(self, keep: Callable[[str], bool]) -> Checkpoint:
        """The weights whose names satisfy ``keep``."""
        kept = {name: tensor for name, tensor in self.state.items() if keep(name)}
        return replace(self, state=kept)

    def assume(self, note: str) -> None:
        """Remark what decides the result without being stated by user or file.

        Reports of the model show it.
        """
        if note not in self.notes:
            self.notes.append(note)

    @property
    def note(self) -> str:
        """All remarks of :meth:`assume`, for a report."""
        return "; ".join(self.notes)

    @property
    def arguments(self) -> dict[str, Any]:
        """The plain arguments of the training that the file holds; {} if there are none."""
        return self.settings("args")

    def stated(self, key: str, low: float, high: float, arguments: Sequence[str] = ()) -> Any:
        """A number that the metadata states as ``key``, else the training's arguments under one of these names.

        None if neither does.
        """
        value = self.number(key, None, low, high)
        for name in arguments:
            if value is None:
                value = self.number(name, None, low, high, self.arguments)

        return value

    def number(self, key: str, default: Any, low: float, high: float, settings: Mapping[str, Any] | None = None) -> Any:
        """A number from ``low`` to ``high`` of a JSON configuration (None: of the metadata).

        It is a whole one if ``low`` is an int; ``default`` if it is missing or null.
        """
        value = (self.metadata if settings is None else settings).get(key)
        kind = type(low)
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
            raise self.error(
                f"states {key} = {stated}, which must be {noun} from {low:g} to {high:g}",
                f"correct {key} or remove it",
            )

        return kind(number)

    def text(self, key: str, default: str) -> str:
        """A text from the metadata: printable characters in one line, at most 80; ``default`` if there are none."""
        line = " ".join(self.metadata.get(key, "").split())
        printable = "".join(c for c in line if c.isprintable())
        return printable[:80] or default

    @property
    def name(self) -> str:
        """Display name: the metadata entry ``name``, else the file's stem.

        The folder's name takes the place of a stem that says nothing.
        """
        says_nothing = self.stem in ("", "model", "diffusion_pytorch_model", "checkpoint-last")
        default = self.folder.name if says_nothing and self.folder.name else self.stem
        name = self.text("name", default)
        # The demo's files bear the name of the picture book that they learned from.
        return name.replace("picture book mar", "demo MAR").replace("picture book", "demo")

    def settings(self, key: str, beside: bool = False) -> dict[str, Any]:
        """A JSON object from the metadata; {} if there is none.

        With ``beside``, a file without a configuration in its metadata takes it from ``<key>.json`` in its folder.
        """
        if key in self.metadata:
            return parse_json(self.metadata[key], f"the entry {key} in {self.path.name}", self.field)

        beside = beside and "config" not in self.metadata
        return read_json(self.folder / f"{key}.json", self.field) if beside else {}


def read(
    path: str | Path,
    field: str = "checkpoint",
    skip: Callable[[str], bool] | None = None,
    shards: Sequence[Path] = (),
    weights: str = AUTO,
) -> Checkpoint:
    """Read a weight file without executing code from it.

    Args:
        path: a safetensors file, or one written by ``torch.save``, see :mod:`.wrappers`.
        field: name of the input that selected the file.
        skip: whether a weight of this name is left out; in safetensors it is not read at all.
        shards: the files that ``path``, a folder, stands for.
        weights: which weights of a training's file: "ema" (averaged), "trained" (the others), or "auto",
            the averaged ones if there are any.

    Raises:
        UserError: if a file is missing, damaged, of another format, or holds other objects than plain
            values and tensors, no tensor, more than 100,000, or an empty one, if two shards hold the same
            weight, or if ``weights`` is unknown.
    """
    if weights not in WEIGHTS:
        raise UserError(f"weights: {str(weights)[:40]!r} is not known; choose {', '.join(WEIGHTS)}")

    whole = Checkpoint({}, {}, Path(path), field)
    for shard in shards or [whole.path]:
        file = _read_file(Checkpoint({}, {}, shard, field, notes=whole.notes), skip, weights)
        if twice := file.state.keys() & whole.state.keys():
            raise file.error(
                f"holds {min(twice)[:80]}, but another shard holds the same weights", "download the shards again"
            )

        whole.state.update(file.state)
        whole.metadata.update(file.metadata)
        whole = replace(whole, averaged=whole.averaged or file.averaged)

    return whole


def _read_file(file: Checkpoint, skip: Callable[[str], bool] | None, weights: str) -> Checkpoint:
    """The contents of one file, see :func:`read`; ``file`` has its path and the input that selected it."""
    if _is_pickled(file):
        state, metadata, averaged = _read_pickled(file, weights)
    else:
        state, metadata = _read_safetensors(file, skip)
        averaged = False  # such a file does not say so

    state, counted = unwrapped(state)
    if not state and skip is None:
        raise file.error("holds no tensors", "choose a file with a model's weights")

    if gather_quantised is not None:
        try:
            state = gather_quantised(state, metadata)
        except Exception as e:  # a damaged file can raise any exception
            raise file.error(
                f"holds 8-bit weights that ComfyUI cannot read ({first_line(e)})",
                "update ComfyUI, or get the fp32, bf16 or fp16 file of the same model",
            ) from e
        metadata.pop("_quantization_metadata", None)

    state = {name: tensor for name, tensor in state.items() if not (skip and skip(name))}
    for name, tensor in state.items():
        if not all(1 <= n <= _LONGEST_AXIS for n in tensor.shape) and not name.endswith("scaled_fp8"):
            raise file.error(f"holds a tensor that is empty or too large ({name[:80]}: {_shape(tensor)})")

    return replace(file, state=state, metadata=metadata, averaged=averaged or counted)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Text entries of a safetensors header; {} for any other file."""
    file = Checkpoint({}, {}, Path(path))
    try:
        if _is_pickled(file):
            return {}

        with _readable(file), mapped.opened(file.path) as opened:
            return dict(opened.metadata() or {})
    except UserError:
        return {}


def _is_pickled(file: Checkpoint) -> bool:
    """Whether a file was written by ``torch.save`` rather than safetensors; a UserError if it is neither."""
    if not os.path.exists(file.path):  # Path.exists can raise
        raise UserError(f"{file.field}: there is no file {file.path}; put the file there, or choose a different file")
    if not os.path.isfile(file.path):
        raise file.error("is a folder or a special file", "choose a file with weights")
    try:
        with file.path.open("rb") as opened:
            head = opened.read(512)
    except OSError as e:
        raise file.error(f"cannot be read ({e.strerror})", "check its permissions") from e

    if head.startswith(b"PK\x03\x04"):
        return True

    header = int.from_bytes(head[:8], "little")
    size = file.path.stat().st_size
    if head[8:9] == b"{" and header <= _HEADER_LIMIT:
        return False
    if head[8:9] == b"{" and header <= size:
        raise file.error(
            f"has a header of {header / 1e6:.1f} MB, more than the limit of {_HEADER_LIMIT / 1e6:.0f} MB",
            "save the weights again with safetensors.torch.save_file, without the long metadata",
        )

    raise file.error(*other_format(head, size))


@contextmanager
def _readable(file: Checkpoint) -> Iterator[None]:
    """A UserError in place of every exception of a block that reads a safetensors file."""
    with file.path.open("rb") as raw:  # the library takes kilobytes for each tensor of a header
        count = raw.read(8 + int.from_bytes(raw.read(8), "little")).count(b'"data_offsets"')

    if count > _MAX_TENSORS:
        raise file.error(f"holds {count} tensors, more than the limit of {_MAX_TENSORS}", "choose a different file")

    try:
        yield
    except MemoryError:
        raise
    except mapped.UnknownDtype as e:
        raise file.error(f"holds weights of a dtype that this version of torch does not have ({e})", INSTEAD) from e
    except Exception as e:  # a damaged file can raise any exception
        if found := _no_room(file, e):
            raise found from e

        raise file.error(f"is damaged or cut short ({first_line(e)})") from e


def _no_room(file: Checkpoint, problem: Exception) -> UserError | None:
    """The error of a file that memory has no room to map; None if that is not the problem."""
    if not any(words in str(problem) for words in _NO_MEMORY):
        return None

    gigabytes = file.path.stat().st_size / 1e9
    return file.error(
        f"has {gigabytes:.1f} GB, which this machine cannot map into its memory now ({first_line(problem)})",
        "close other programs, enlarge the swap file (page file), or choose a smaller model",
    )


def _read_safetensors(file: Checkpoint, skip: Callable[[str], bool] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of a safetensors file."""
    with _readable(file):
        state, metadata = mapped.read_tensors(file.path, lambda name: not (skip and skip(name)))

    groups = state.pop(STATED_GROUPS, None)
    if groups is not None and groups.numel() == 1:
        metadata.setdefault("groups", str(groups.item()))
    return state, metadata


def _read_pickled(file: Checkpoint, weights: str) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Weights and metadata of a file of ``torch.save``, and whether it says that these are averaged weights."""
    try:
        unpacked = unpack(_unpickled(file), weights)
    except NoWeights as e:
        raise file.error(str(e), e.remedy) from e
    for note in unpacked.notes:
        file.assume(note)

    for name, tensor in unpacked.state.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise file.error(
                f"holds a tensor that is sparse, quantised or without values ({name[:80]})",
                "save its weights again as plain tensors, for example with to_dense(), or choose a different file",
            )

    # Zero strides turn a few bytes into gigabytes. The factor 2 allows for shared weights.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in unpacked.state.values())
    if claimed > 2 * file.path.stat().st_size:
        raise file.error("has fewer bytes than the weights that it describes")

    metadata = {"args": json.dumps(unpacked.arguments)} if unpacked.arguments else {}
    return unpacked.state, metadata, unpacked.averaged


def _unpickled(file: Checkpoint) -> Any:
    """The content of a file of ``torch.save``; a UserError if it holds anything else than tensors and plain values."""
    if _TORCH < (2, 6):  # older weights-only unpicklers can be made to execute code (CVE-2025-32434)
        raise file.error(
            f"is a pickled checkpoint, which torch {torch.__version__} cannot read safely",
            "use torch 2.6 or newer, or a .safetensors file",
        )
    if file.path.suffix == ".safetensors":  # torch does not map such files
        raise file.error(
            "is a torch checkpoint, although its name ends in .safetensors", "change the ending of its name to .pt"
        )

    try:
        with torch.serialization.safe_globals([argparse.Namespace, _EasyDict]):
            archive.check(file.path)
            return torch.load(str(file.path), map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    except archive.Refused as e:
        raise file.error(str(e), e.remedy) from e
    except MemoryError:
        raise
    except Exception as e:  # a damaged file can raise any exception
        if no_room := _no_room(file, e):
            raise no_room from e

        cause = e.__context__ or e  # without torch's page of advice around it
        raise file.error(
            f"is damaged, or torch.save did not write it ({first_line(cause)})",
            f"{_UNCHANGED}, or save its state_dict again with torch.save",
        ) from e


def expect_no_broken_link(path: Path, field: str) -> None:
    """Raise a UserError if a link on the way to ``path`` leads nowhere, as one to a drive that is not connected."""
    for place in (*reversed(path.parents), path):
        if os.path.islink(place) and not os.path.exists(place):
            raise UserError(
                f"{field}: {path.name} cannot be found, because {place} is a link to {os.readlink(place)}, which leads "
                "to no file or folder; connect the drive that holds the file, or choose a different file"
            )


def member(path: Path, field: str) -> Path:
    """A file of a model folder.

    Raises:
        UserError: if it is a link that leads nowhere, or out of the folder, unless within Hugging Face's cache.
    """
    if os.path.islink(path) and not os.path.exists(path):  # or leads to itself
        raise UserError(f"{field}: {path.name} in {path.parent} is a broken link; put the file itself into this folder")

    folder = path.parent.resolve()
    target = path.resolve()
    # Its files link to its own blobs, which since version 1.3x may link to those of all models.
    blobs = [above / "blobs" for above in folder.parents[1:3]]
    cached = folder.parent.name == "snapshots" and any(blob in target.parents for blob in blobs)
    if folder not in target.parents and not cached:
        raise UserError(
            f"{field}: {path.name} in {path.parent} is a link to a file outside this folder; put the file itself into "
            "the folder"
        )

    return path


def read_text(path: Path, field: str) -> str:
    """The text of a file of a model folder; a UserError if it is unreadable, too large, or a link out of the folder."""
    member(path, field)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        if not path.is_file():  # a pipe, say, which would be waited for
            raise ValueError("it is not a regular file")
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin a text with a byte order mark
    except (OSError, ValueError) as e:
        raise UserError(
            f"{field}: {path.name} in {path.parent} cannot be read ({first_line(e)}); get the file again"
        ) from e


def read_json(path: Path, field: str) -> dict[str, Any]:
    """A JSON object from a file of a model folder; {} if the file does not exist. Errors as :func:`parse_json`."""
    if not os.path.lexists(path):
        return {}

    return parse_json(read_text(path, field), f"{path.name} in {path.parent}", field)


def parse_json(text: str, where: str, field: str) -> dict[str, Any]:
    """A JSON object; a UserError if the text is none, where ``where`` says where it stands."""
    try:
        value = json.loads(text.removeprefix("\ufeff"))  # the byte order mark of a file that became an entry
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as e:
        raise UserError(f"{field}: {where} cannot be read ({first_line(e)}); get the file again") from e

    return value


def shown(value: Any) -> str:
    """A value of a JSON file for a message: a text in quotes, so that it differs from a number."""
    if isinstance(value, dict):  # possibly too deep to be written out
        return "a dictionary"
    if isinstance(value, list):
        return "a list"

    return repr(value)[:40] if isinstance(value, str) else json.dumps(value)[:40]


@contextmanager
def misfits(file: Checkpoint) -> Iterator[None]:
    """Report what missing, misshaped or contradictory weights of ``file`` raise in the block as a UserError."""
    try:
        yield
    except UserError:
        raise
    except KeyError as e:
        raise file.error(f"does not fit {file.what}: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, RuntimeError, TypeError) as e:
        sentence = isinstance(e, ValueError) and "values to unpack" not in str(e)  # a network's own, not Python's
        cause = first_line(e) if sentence else f"a weight has a wrong shape: {first_line(e)}"
        raise file.error(f"does not fit {file.what} ({cause})") from e


def load_strictly(
    file: Checkpoint,
    make: Callable[[Operations], N],
    *,
    operations: Operations = FAST,
    dtype: torch.dtype = torch.float32,
    fp32: Collection[str] = (),
    device: str | torch.device = "cpu",
    bits: str = "",
) -> N:
    """A network in eval mode, without gradients, with copies of all weights of a file.

    Weights are converted one by one as they are read, so that beside the network itself there is one weight in memory.

    Args:
        file: the weights.
        make: constructs the network of operations, on the device "meta", where weights take no memory.
        operations: see :class:`.ops.Operations`.
        dtype: of the weights.
        fp32: name prefixes of weights that are fp32 regardless of ``dtype``.
        device: of the weights. On "meta" the network has shapes only, and no weight is read.
        bits: of the weights in the blocks, see :class:`.kinds.Precision`.

    Raises:
        UserError: if names are missing, unexpected or misshaped, or weights are no finite floating-point numbers.
    """
    with misfits(file), shapes_only():
        own = operations in (FAST, TORCH)
        net = make(operations if own else TORCH)
        _expect_same_weights(file, net.state_dict())

        layers = _quantised_layers(file, net, bits)
        if layers:
            operations = operations.quantised(dtype, _bytes(net, layers, dtype))
        if not own:  # a host's layers may have no weights before they are loaded
            net = make(operations)

        formats = {}
        room = {}
        for layer, (weight, format) in layers.items():
            room[layer] = operations.format(format, file.state[weight].shape, torch.device(device), dtype)
            formats[weight] = room[layer]
        operations.make_room(net, room)

    loaded: dict[str, Tensor] = {}
    made: dict[tuple[int, torch.dtype], Tensor] = {}  # a weight with two names stays one
    for name, tensor in file.state.items():
        _expect_plain(file, name, tensor)
        if name in formats:
            _expect_finite(file, name, tensor)
            loaded.update(operations.entries(name, _rounded(tensor, formats[name], device, operations)))
            continue

        target = torch.float32 if name.startswith(tuple(fp32)) else dtype
        if (id(tensor), target) not in made:
            made[id(tensor), target] = tensor.to(device=device, dtype=target, copy=True).contiguous()
        loaded[name] = made[id(tensor), target]
        if not loaded[name].is_meta and not is_finite(loaded[name]):
            _expect_finite(file, name, tensor)
            short = str(dtype).removeprefix("torch.")
            raise file.error(f"has weights in {name[:80]} that are too large for {short}", "choose dtype bf16 or fp32")

    net.load_state_dict(loaded, strict=True, assign=True)
    limit_packing(net)
    return net.eval().requires_grad_(False)


def _quantised_layers(file: Checkpoint, net: nn.Module, bits: str) -> dict[str, tuple[str, Format]]:
    """The layers of a network that get quantised weights: by name the weight in the file, and its format."""
    if not bits:
        return {}

    names = {id(parameter): name for name, parameter in net.state_dict(keep_vars=True).items()}
    found = {}
    for layer in blocks_layers(net):
        weight = names[id(net.get_submodule(layer).weight)]
        held = file.state[weight]
        if bits != AUTO:
            found[layer] = weight, format_of(QUANTISED[bits], layer, held.shape)
        elif kind_of(held):
            found[layer] = weight, Format(kind_of(held))

    return found


def _bytes(net: nn.Module, layers: Mapping[str, tuple[str, Format]], dtype: torch.dtype) -> int:
    """Bytes of the weights of a network with quantised layers."""
    numbers = {name: parameter.numel() for name, parameter in net.named_parameters()}
    bits = dict.fromkeys(numbers, 8.0 * dtype.itemsize)
    bits |= {f"{layer}.weight": format.bits for layer, (_, format) in layers.items()}
    return int(sum(numbers[name] * bits[name] for name in numbers) / 8)


def _rounded(
    tensor: Tensor, format: Format, device: str | torch.device, operations: Operations
) -> Quantized | FourBits:
    """A weight in a format, on a device: as the file holds it, or rounded."""
    if format.group or kind_of(tensor) != format.kind:
        return operations.round(tensor.to(device), format)
    if isinstance(tensor, Quantized):
        return tensor.placed(device)

    return Quantized(tensor, torch.ones(())).placed(device)  # fp8 without a scale


def _expect_same_weights(file: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Raise a UserError unless a file holds the expected names with the expected shapes, and no others."""
    wrong: dict[str, list[str]] = {
        "missing": [name for name in expected if name not in file.state],
        "unexpected": [name for name in file.state if name not in expected],
        "of a wrong shape": [],
    }
    for name, tensor in expected.items():
        if name in file.state and file.state[name].shape != tensor.shape:
            wrong["of a wrong shape"].append(f"{name} is {_shape(file.state[name])}, not {_shape(tensor)}")
    if not any(wrong.values()):
        return

    found = []
    for kind, names in wrong.items():
        if names:
            some = ", ".join(names[:3])[:240] + ", ..." * (len(names) > 3)
            found.append(f"{amount(len(names), 'weights')} {kind} ({some})")

    only_unexpected = not wrong["missing"] and not wrong["of a wrong shape"]
    remedy = "save the file without these weights, or choose a different file" if only_unexpected else _UNCHANGED
    raise file.error(f"does not fit {file.what}: {', '.join(found)}", remedy)


def _expect_finite(file: Checkpoint, name: str, tensor: Tensor) -> None:
    """Raise a UserError unless all numbers of a weight are finite."""
    if tensor.is_meta or is_finite(tensor):
        return

    raise file.error(
        f"holds NaN or infinite weights in {name[:80]}, because the file is damaged or its training run diverged",
        "download the file again, or choose a different file",
    )


def _expect_plain(file: Checkpoint, name: str, tensor: Tensor) -> None:
    """Raise a UserError unless a weight is a dense tensor of floating-point numbers."""
    if tensor.is_floating_point() and tensor.layout is torch.strided:
        return

    kind = str(tensor.dtype).removeprefix("torch.")
    raise file.error(
        f"holds {kind} instead of ordinary weights in {name[:80]}, so the file is quantised or packed",
        INSTEAD,
    )


def _shape(tensor: Tensor) -> str:
    """For example "3x4"."""
    return "x".join(map(str, tensor.shape)) or "a single number"
