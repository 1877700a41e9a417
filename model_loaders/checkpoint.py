"""Weight files: safe reading, and strict loading into a network.

A file is judged by its first bytes, never by its extension. safetensors hold numbers only. Pickled checkpoints go
through torch's weights-only reader, which runs nothing from the file; what it lets in besides tensors are the two
classes in which official training scripts keep their arguments beside the weights: ``argparse.Namespace``, and easydict's
dictionary, in whose place stands one of ours. Whatever is wrong with a file ends in one sentence (:class:`~..errors.UserError`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Where training scripts put the weights, best first: the moving average is what papers evaluate.
_NESTS = ("model_ema", "ema", "model", "module", "state_dict", "sd")
# How the two pickled formats of torch.save begin.
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_HEADER_LIMIT = 100_000_000  # the safetensors format's own limit
_NAMES_SHOWN = 10
UNCHANGED = "get an unchanged copy of the file"
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])


class _EasyDict:
    """Stands for easydict's dictionary while a pickle is read, and makes one that the reader fills."""

    def __new__(cls, *_: object) -> Any:
        return OrderedDict()


# The reader goes by these names.
_EasyDict.__module__, _EasyDict.__qualname__, _EasyDict.__name__ = "easydict", "EasyDict", "EasyDict"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds.

    Attributes:
        state: parameter names to tensors on the CPU, in the file's dtype, possibly still mapped to the file.
        metadata: the safetensors header's free entries. Of a pickle whose weights stand as ``sd`` beside ``args`` (Tar):
            "args", those arguments that are plain values, as JSON; empty for others.
        path: the file.
        field: what a person filled in to get here; messages begin with it.
    """

    state: dict[str, Tensor]
    metadata: dict[str, str]
    path: Path
    field: str = "checkpoint"

    def complain(self, found: str, remedy: str = UNCHANGED) -> UserError:
        """The error "field: file name found; remedy"."""
        return UserError(f"{self.field}: {self.path.name} {found}; {remedy}")


# --------------------------------------------------------------------------------------------------- reading


def read(path: str | Path, field: str = "checkpoint") -> Checkpoint:
    """Read a weight file without running anything in it.

    Args:
        path: a safetensors file, or one that ``torch.save`` wrote: flat, or nested under ``model_ema`` (preferred),
            ``ema``, ``model``, ``module``, ``state_dict`` or ``sd``. A ``module.`` in front of every name is taken off.
        field: what a person filled in to get here; messages begin with it.

    Raises:
        UserError: the file is missing, empty, damaged, of another format, holds anything but numbers, or no tensor.
    """
    path = Path(path)
    if _format(path, field) == "safetensors":
        state, metadata = _read_safetensors(path, field)
    else:
        state, metadata = _tensors(_read_pickled(path, field), path, field)
    if not state:
        raise UserError(f"{field}: {path.name} holds no tensors; choose a file with a model's weights")
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return Checkpoint(state, metadata, path, field)


def read_metadata(path: str | Path) -> dict[str, str]:
    """The free text entries of a safetensors header, without touching the weights; {} for any other file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(length)).get("__metadata__", {}) if length <= _HEADER_LIMIT else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _format(path: Path, field: str) -> str:
    """What the content is: "safetensors" or "pickled"."""
    if not os.path.exists(path):  # unlike Path.exists, never an exception
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
    raise UserError(f"{field}: {path.name} is {_looks_like(head)}; choose a .safetensors file or a torch checkpoint")


def _looks_like(head: bytes) -> str:
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
    return "no weight file that is known here"


def _read_safetensors(path: Path, field: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError) as e:
        raise UserError(f"{field}: {path.name} is damaged or cut short ({_first_line(e)}); {UNCHANGED}") from e


def _read_pickled(path: Path, field: str) -> object:
    if _TORCH < (2, 6):
        # Older weights-only readers can be made to run code (CVE-2025-32434).
        raise UserError(
            f"{field}: {path.name} is a pickled checkpoint, which torch {torch.__version__} cannot read safely; "
            "use a .safetensors version of it, or torch 2.6 or newer"
        )
    with path.open("rb") as file:
        zipped = file.read(4) == _ZIP
    # Newer torch takes a file of that name for what it says, and only files by name can be mapped.
    mapped = zipped and path.suffix != ".safetensors"
    try:
        with torch.serialization.safe_globals([argparse.Namespace, _EasyDict]), path.open("rb") as file:
            source = str(path) if mapped else file
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as e:
        named = re.search(r"GLOBAL (\S+)", str(e))
        raise UserError(
            f"{field}: {path.name} holds more than numbers ({named[1] if named else 'objects torch does not trust'}); "
            "that could be code, so nothing of it was loaded: use a .safetensors version of it"
        ) from e
    except MemoryError:
        raise
    except Exception as e:  # the reader meets damage in many ways; none of them is of our making
        raise UserError(f"{field}: {path.name} is damaged or no checkpoint ({_first_line(e)}); {UNCHANGED}") from e


def _tensors(found: Any, path: Path, field: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights inside what a pickled file held, and the arguments beside them."""
    metadata: dict[str, str] = {}
    for _ in range(len(_NESTS)):  # bounded, because a pickled dictionary may contain itself
        if not isinstance(found, Mapping):
            raise UserError(
                f"{field}: {path.name} holds a {type(found).__name__}, not a dictionary of weights; choose another file"
            )
        inner = next((found[key] for key in _NESTS if isinstance(found.get(key), Mapping) and found[key]), None)
        if inner is None:
            break
        arguments = found.get("args") if inner is found.get("sd") else None
        if isinstance(arguments, Mapping):
            plain = {str(k): v for k, v in arguments.items() if v is None or isinstance(v, (bool, int, float, str))}
            metadata["args"] = json.dumps(plain)
        found = inner
    state = {k: v.detach() for k, v in found.items() if isinstance(k, str) and isinstance(v, Tensor)}
    # Strides of zero make gigabytes out of a few bytes. Two, because weights may be shared.
    if sum(t.numel() * t.element_size() for t in state.values()) > 2 * path.stat().st_size:
        raise UserError(f"{field}: {path.name} claims more weights than it holds bytes; get the original file")
    return state, metadata


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]


# ------------------------------------------------------------------------------------------- what a file is for

_WORDS = {
    "mar": "a MAR",
    "kl": "a KL autoencoder",
    "vq": "a VQ autoencoder",
    "llamagen": "a LlamaGen",
    "t5": "a T5 text encoder",
    "tar language model": "a language model",
    "ta-tok": "a TA-Tok",
    "dtok": "a Tar de-tokenizer",
}
# Where a file belongs that was chosen for something else of the same loader: (what it is, what was wanted).
_PLACES = {
    ("mar", "kl"): "choose it as checkpoint",
    ("kl", "mar"): "choose it as decoder",
    ("llamagen", "vq"): "choose it as checkpoint",
    ("vq", "llamagen"): "choose it as decoder",
    ("vq", "dtok"): "choose it as decoder",
    ("dtok", "vq"): "choose it as checkpoint",
    ("ta-tok", "dtok"): "choose it as ta_tok",
    ("dtok", "ta-tok"): "choose it as checkpoint",
    ("dtok", "llamagen"): "load it with Load Tar De-tokenizer",
    ("llamagen", "dtok"): "load it with Load LlamaGen / PAR",
    ("dtok", "tar language model"): "load it with Load Tar De-tokenizer",
    ("tar language model", "dtok"): "load it with Load Tar",
}
_ANOTHER = "choose another file"


def identify(state: Mapping[str, object]) -> str:
    """The family whose parameter names these are.

    Returns:
        "mar", "kl", "vq", "llamagen", "dtok", "ta-tok", "t5", "tar language model" or "unknown".
    """
    if any(name.startswith("diffloss.net.") for name in state):
        return "mar"
    if "quantize.embedding.weight" in state:
        return "vq"
    if "post_quant_conv.weight" in state and any(name.startswith("decoder.") for name in state):
        return "kl"
    if "tok_embeddings.weight" in state and any(name.startswith("cls_embedding.") for name in state):
        return "llamagen"
    if "tok_embeddings.weight" in state and any(name.startswith("clip_proj.") for name in state):
        return "dtok"
    if any(name.startswith("bottleneck.regularizer.") for name in state):
        return "ta-tok"
    if any(name.startswith("encoder.block.0.layer.0.SelfAttention.") for name in state):
        return "t5"
    if any(name.endswith("embed_tokens.weight") for name in state):
        return "tar language model"
    return "unknown"


def part(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """What stands under a prefix ("vq.", "ta_tok.") of a file that holds several networks; any other file as it is."""
    inside = {name.removeprefix(prefix): t for name, t in checkpoint.state.items() if name.startswith(prefix)}
    return replace(checkpoint, state=inside) if inside else checkpoint


def expect(checkpoint: Checkpoint, family: str) -> None:
    """Nothing if the file holds ``family`` (one of :func:`identify`'s words).

    Raises:
        UserError: it holds another; the sentence says which, and where that one belongs.
    """
    found = identify(checkpoint.state)
    if found == family:
        return
    if found == "unknown":
        names = ", ".join(_shown(name) for name in sorted(checkpoint.state)[:3])
        raise checkpoint.complain(f"holds no weights of {_WORDS[family]} (but {names})", _ANOTHER)
    raise checkpoint.complain(f"holds {_WORDS[found]}, not {_WORDS[family]}", _PLACES.get((found, family), _ANOTHER))


def metadata_number(
    checkpoint: Checkpoint, key: str, default: Any, low: float, high: float, kind: Callable[[str], Any]
) -> Any:
    """A number from the file's metadata.

    Args:
        key: its name; ``default`` if the file has no such entry.
        low, high: smallest and largest value allowed.
        kind: ``int`` or ``float``.

    Raises:
        UserError: the entry is no number, or out of range.
    """
    text = checkpoint.metadata.get(key)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        noun = "a whole number" if kind is int else "a number"
        raise checkpoint.complain(
            f"says {key} = {_shown(text)} in its metadata, which must be {noun} from {low} to {high}"
        )
    return value


def metadata_text(checkpoint: Checkpoint, key: str, default: str) -> str:
    """A short text from the file's metadata: one printable line of at most 80 characters."""
    text = "".join(c for c in " ".join(checkpoint.metadata.get(key, "").split()) if c.isprintable())
    return text[:80] or default


# --------------------------------------------------------------------------------------------------- loading


def choose_dtype(name: str, device: str | torch.device, bf16: bool = False) -> torch.dtype:
    """The dtype a network computes in.

    Args:
        name: "fp32", "bf16", "fp16", or "auto": fp16 on graphics hardware made for it, else fp32. Not bf16: a
            denoiser's rounding errors are multiplied by hundreds in its first step (316 at 100 diffusion steps),
            which makes 0.15 of fp16's and about 1 of bf16's; fp16 is also what MAR was evaluated in.
        device: where it will compute.
        bf16: for networks that were trained and evaluated in it (LlamaGen, T5), "auto" means bf16 where CUDA hardware
            computes it.

    Raises:
        UserError: no such name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UserError(f"dtype: {name!r} is not known; choose auto, {', '.join(DTYPES)}")
    device = torch.device(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if bf16 and capability >= (8, 0):
            return torch.bfloat16
        # Before Volta half precision is no quicker than fp32, and on some cards far slower.
        return torch.float16 if capability >= (7, 0) else torch.float32
    return torch.float16 if device.type in ("mps", "xpu") else torch.float32


def load_strictly(
    net: nn.Module,
    state: Mapping[str, Tensor],
    path: Path,
    what: str,
    *,
    dtype: torch.dtype | None = None,
    fp32: Collection[str] = (),
    device: str | torch.device = "cpu",
    field: str = "checkpoint",
) -> None:
    """Give ``net`` its weights: all of them or, if anything is wrong, none.

    Args:
        net: the network, on any device; on "meta" no memory is spent twice.
        state: parameter names to tensors. They are copied, so the file may change or go afterwards.
        path, what: the file and the kind of network ("a MAR"), for messages.
        dtype: dtype of the weights afterwards; None keeps the file's.
        fp32: beginnings of names that stay in fp32 whatever ``dtype`` says.
        device: where the weights go.
        field: what messages begin with.

    Raises:
        UserError: names missing, unexpected or misshaped (at most ten are listed), or weights that are no finite
            floating-point numbers.
    """
    label = f"{field}: {path.name}"
    wanted = net.state_dict()
    wrong = {
        "missing": [name for name in wanted if name not in state],
        "unexpected": [name for name in state if name not in wanted],
        "misshaped": [name for name, t in wanted.items() if name in state and state[name].shape != t.shape],
    }
    if any(wrong.values()):
        raise UserError(f"{label} does not fit {what}: {_listed(wrong, wanted, state)}; {UNCHANGED}")
    strange = [n for n, t in state.items() if not t.is_floating_point() or t.layout is not torch.strided]
    if strange:
        kind = str(state[strange[0]].dtype).removeprefix("torch.")
        raise UserError(f"{label} holds {kind} and no plain weights in {_some(strange)}; get an fp32 or fp16 file")
    loaded = {}
    for name, tensor in state.items():
        target = torch.float32 if name.startswith(tuple(fp32)) and dtype is not None else dtype
        loaded[name] = tensor.to(dtype=target, copy=True).contiguous()
    broken = [name for name, tensor in loaded.items() if not _finite(tensor)]
    if broken and all(_finite(state[name]) for name in broken):
        raise UserError(f"{label} has weights too large for {dtype} in {_some(broken)}; choose dtype bf16 or fp32")
    if broken:
        raise UserError(f"{label} holds NaN or infinite weights in {_some(broken)}; get the file again")
    net.load_state_dict({name: tensor.to(device) for name, tensor in loaded.items()}, strict=True, assign=True)


def _finite(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    if tensor.element_size() == 1:  # fp8 has no minimum and maximum of its own
        tensor = tensor.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _listed(wrong: dict[str, list[str]], wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """E.g. "1 misshaped (c is 3x4, not 3x5), 12 missing (a, b), 10 of them not named", with at most ten names."""
    kinds = sorted((kind for kind in wrong if wrong[kind]), key=lambda kind: len(wrong[kind]))
    left, parts = _NAMES_SHOWN, []
    for i, kind in enumerate(kinds):
        some = wrong[kind][: left // (len(kinds) - i)]
        left -= len(some)
        shown = [_shown(name) for name in some]
        if kind == "misshaped":
            shown = [f"{_shown(n)} is {_shape(state[n])}, not {_shape(wanted[n])}" for n in some]
        parts.append(f"{len(wrong[kind])} {kind} ({', '.join(shown)})")
    hidden = sum(map(len, wrong.values())) - (_NAMES_SHOWN - left)
    return ", ".join(parts) + (f", {hidden} of them not named" if hidden else "")


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(_shown, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"


def _shown(name: str) -> str:
    """A name or value out of a file, fit for a message."""
    name = name if name.isprintable() else ascii(name)
    return name if len(name) <= 80 else name[:77] + "..."
