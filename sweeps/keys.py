"""Names of a sweep's cells: digests of all that the images depend on."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from ..runs.registry import ALGORITHM

# Values of a weight that its digest reads.
_SAMPLED = 4096
# What tells one tokenizer from another.
_SENTENCE = "a red boat, 2 cats"
_LONGEST_WORDS = 80


def cell_key(models: Any, drawn: Any, on: Any, sampler: str, settings: Mapping[str, Any], seed: int) -> str:
    """The key of a cell, 32 hexadecimal digits.

    Two cells of one key have the same images, so that a finished one is not drawn again.

    Args:
        models: the records of all models, as their loaders made them, or digests of them.
        drawn: what the images show, and which of them are drawn at once.
        on: what decides the last bits beside the models: device, dtype, threads.
        sampler: registry name.
        settings: all settings by name.
        seed: of the noise.
    """
    return digest(ALGORITHM, models, drawn, on, sampler, settings, seed)


def cell_name(words: str, key: str, digits: int) -> str:
    """File name of a cell: ``words``, with a hyphen for every character that some file system does not allow, and the
    first ``digits`` digits of the key.
    """
    slug = re.sub(r"[^A-Za-z0-9.+]+", "-", words).strip("-.+")[:_LONGEST_WORDS]
    return f"{slug}-{key[:digits]}"


def digest(*parts: Any, weights: bool = True) -> str:
    """32 hexadecimal digits by content, of numbers, text, tensors, mappings, sequences, dataclasses, and the records of
    models, down to their networks.

    All fields of a dataclass enter but ``name``, which says what a user called it, and those with ``compare=False``, on
    which no image depends. A network is its configuration and, with ``weights``, its weights; a tokenizer is what it
    makes of a sentence.

    Raises:
        TypeError: a part is none of these.
    """
    text = json.dumps(parts, sort_keys=True, default=partial(_plain, weights))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(weights: bool, part: Any) -> Any:
    """What JSON has no form for, as something it has one for."""
    if isinstance(part, torch.nn.Module):
        return [type(part).__name__, getattr(part, "config", None), weights_digest(part) if weights else ""]

    if isinstance(part, torch.Tensor):
        flat = part.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes()
        return [str(part.dtype), part.shape, hashlib.sha256(content).hexdigest()]

    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, Sequence):
        return list(part)
    if isinstance(part, Set):
        return sorted(part)
    if is_dataclass(part) and not isinstance(part, type):
        deciding = [f.name for f in fields(part) if f.name != "name" and f.compare]
        return [type(part).__name__, {name: getattr(part, name) for name in deciding}]
    if callable(part):
        return list(part(_SENTENCE))

    raise TypeError(f"no digest of a {type(part).__name__}")


def weights_digest(net: torch.nn.Module) -> str:
    """A digest of a network's weights: name, shape and dtype of every tensor, and up to 4096 evenly spaced values.

    Reading all values of a large model would take longer than many cells.
    """
    shapes = {}
    sampled = {}
    for name, tensor in net.state_dict().items():
        flat = tensor.detach().reshape(-1)
        stride = max(1, math.ceil(len(flat) / _SAMPLED))

        shapes[name] = tensor.shape
        sampled[name] = flat[::stride]

    return digest(shapes, sampled)
