"""Parity cases of LlamaGen's VQ tokenizer.

``vqNAME_io.safetensors`` with ``vqNAME.safetensors`` gives two cases: decoding (of the grids in the file) and encoding.
``keys_*vq*.json`` gives one: names and shapes of an official file, compared with a network of that size on the meta
device. All sizes are read from the files.
"""

import math
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch

from ...model_loaders.autoencoders.loader import load_vq
from ...networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from .cases import Case, Check, exact, gathered, read_json, read_tensors, same_shapes

_GRID = re.compile(r"indices_(\d+)x(\d+)")


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    out: list[Case] = []
    for path in sorted(folder.glob("vq*_io.safetensors")):
        out += gathered(f"llamagen/{path.stem.removesuffix('_io')}", partial(_tokenizer, path))
    return [*out, *(_key_list(path) for path in sorted(folder.glob("keys_*.json")) if "vq" in path.stem)]


@lru_cache(maxsize=2)
def _net(path: Path) -> VQAutoencoder:
    return load_vq(path, "fp32").net


def _tokenizer(path: Path) -> Iterator[Case]:
    data, name = read_tensors(path), path.stem.removesuffix("_io")
    weights = path.with_name(f"{name}.safetensors")
    if not weights.is_file():
        raise FileNotFoundError(f"{weights.name} is not beside it")

    def decode() -> Iterator[Check]:
        net = _net(weights)
        for m in filter(None, map(_GRID.fullmatch, data)):
            grid = f"{m[1]}x{m[2]}"
            codes = data[m[0]].view(-1, int(m[1]), int(m[2]))
            vectors = net.vectors(codes)
            # The codebook may contain a vector twice, so vectors are compared, not codes.
            yield exact(net.vectors(net.codes(vectors)), vectors)
            if f"zq_{grid}" in data:
                yield Check(vectors, data[f"zq_{grid}"])
            if f"post_quant_{grid}" in data:
                yield Check(net.post_quant_conv(vectors), data[f"post_quant_{grid}"])
            yield Check(net.decode_codes(codes), data[f"decode_{grid}"])
            # The path of a LATENT through core's VAE Decode, in half precision.
            yield Check(net.decode(vectors.half()), data[f"decode_{grid}"])

    def encode() -> Iterator[Check]:
        net = _net(weights)
        yield Check(net.features(data["image"]), data["enc_h"])
        vectors, codes = net.encode(data["image"])
        yield exact(codes.flatten(1), data["enc_indices"])
        yield Check(net.decode(vectors), data["recon"])

    yield Case(f"llamagen/{name}.decode", decode)
    if "image" in data:
        yield Case(f"llamagen/{name}.encode", encode)


def _key_list(path: Path) -> Case:
    return Case(f"llamagen/keys.{path.stem.removeprefix('keys_')}", partial(_keys, path))


def _keys(path: Path) -> Iterator[Check]:
    """Names and shapes of an official file, and the number of its elements."""
    listed = read_json(path)
    elements = sum(math.prod(shape) for shape in listed["keys"].values())
    yield exact(torch.tensor(elements), torch.tensor(listed["total_elements"]))
    # The record of used codes is not a weight; the loader ignores it.
    yield same_shapes(listed["keys"], lambda state: VQAutoencoder(VQConfig.from_state_dict(state)), (HISTORY,))
