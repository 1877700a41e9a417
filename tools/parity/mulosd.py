"""Parity cases of MuLo-SD and of the LANTERN-style comparison.

``mulosd_geometry.json`` lists grids with rejected cells and the expected regions, islands and waves; one case each.
``lantern_accept_io`` contains draft trees that the published code verified; one case per tree, setting and decoding mode.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...samplers.tokens import islands as geometry
from ..lantern import certain_rest, likeliest, relaxed
from .cases import Case, Check, exact, gathered, read_json, read_tensors, relative

GEOMETRY, LANTERN = "mulosd_geometry.json", "lantern_accept_io.safetensors"
_JUDGED = re.compile(r"(.+)\.(greedy|sample)\.(off|(?:pp_)?k(\d+)_[dl]([\d.]+))\.best")


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``."""
    out: list[Case] = []
    known = ((GEOMETRY, "tar/mulosd_geometry", _geometry), (LANTERN, "llamagen/lantern_accept", _lantern))
    for file, name, make in known:
        if (folder / file).is_file():
            out += gathered(name, partial(make, folder / file)) or [Case(name, lambda: ())]
    return out


def _geometry(path: Path) -> Iterator[Case]:
    for i, case in enumerate(read_json(path)):
        yield Case(f"tar/mulosd_geometry.{i}", partial(_grid, case))


def _grid(case: dict[str, Any]) -> Iterator[Check]:
    down = np.zeros((1, case["H"], case["W"]), bool)
    down.reshape(-1)[case["R_T"]] = True
    region = geometry.expand(down, case["l"])
    islands = geometry.islands(region)
    yield exact(torch.from_numpy(region.ravel().nonzero()[0]), torch.tensor(case["R_X"], dtype=torch.int64))
    parts = (islands, 1, case["islands"]), (geometry.waves(islands, case["window"]), 0, case["waves"])
    for computed, first, expected in parts:
        recorded = np.full(down.size, first - 1)
        for number, cells in enumerate(expected):
            recorded[cells] = first + number
        yield exact(torch.from_numpy(computed.ravel()), torch.from_numpy(recorded))


def _lantern(path: Path) -> Iterator[Case]:
    data = read_tensors(path)
    yield Case("llamagen/lantern_accept.nearest", partial(_nearest, data))
    for key in sorted(data):
        if m := _JUDGED.fullmatch(key):
            k, delta = (int(m[4]), float(m[5])) if m[4] else (0, 0.0)
            how = _greedy if m[2] == "greedy" else _sampled
            checks = partial(how, data, m[1], key.removesuffix("best"), k, delta)
            yield Case(f"llamagen/lantern_accept.{key.removesuffix('.best')}", checks)


def _nearest(data: dict[str, Tensor]) -> Iterator[Check]:
    """Compares distances, because the order of equally distant codes is arbitrary. The published table uses the stored codebook."""
    codes = data["codebook"]
    distance = (codes[:, None] - codes).norm(dim=-1)
    ours = geometry.neighbours(codes, data["nearest"].shape[1])
    yield exact(ours[:, 0], torch.arange(len(codes)))
    yield relative(distance.gather(1, ours[:, 1:].long()), distance.gather(1, data["nearest"].long()))


def _greedy(data: dict[str, Tensor], tree: str, run: str, k: int, delta: float) -> Iterator[Check]:
    drafts = data[f"{tree}.candidates"][:, 1:]
    p = data[f"{tree}.logits"][:, :-1].softmax(-1)
    kept = likeliest(p, drafts.clamp(min=0), data["nearest"][:, :k], delta) & (drafts >= 0)
    lengths = kept.cumprod(1).sum(1)
    yield exact(torch.stack([lengths.argmax(), lengths.max()]), data[f"{run}best"])


def _sampled(data: dict[str, Tensor], tree: str, run: str, k: int, delta: float) -> Iterator[Check]:
    """Verification of a draft tree: the children of the accepted prefix in turn, each against the residual distribution."""
    paths, logits, uniforms = data[f"{tree}.candidates"], data[f"{tree}.logits"], data[f"{run}u"].tolist()
    nearest, depth = data["nearest"], paths.shape[1]
    length, best, used = 1, 0, 0
    residual = logits[0, 0].softmax(-1)
    while length < depth:
        children = (paths[:, :length] == paths[best, :length]).all(1).nonzero()[:, 0]
        residual, before = logits[children[0], length - 1].softmax(-1), length
        seen_drafts: set[int] = {-1}
        for path in children.tolist():
            draft = paths[path, length]
            if int(draft) in seen_drafts:
                continue
            seen_drafts.add(int(draft))
            counted, lent = relaxed(residual, draft, nearest[:, :k], delta)
            used += 1
            if uniforms[used - 1] <= float(counted):
                length, best = length + 1, path
                break
            residual = certain_rest(residual, draft, lent, nearest[:, : k + 1])
        if length == before:
            break
    else:
        residual = logits[best, length - 1].softmax(-1)
    yield exact(torch.tensor([best, length - 1]), data[f"{run}best"])
    yield exact(torch.tensor(used), torch.tensor(len(uniforms)))
    yield Check(residual, data[f"{run}next_p"])
