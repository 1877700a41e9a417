"""Parity cases of MuLo-SD.

``mulosd_geometry.json`` lists grids with rejected cells and the expected regions, islands and waves; one case each.
``lantern_neighbours`` contains a codebook and the nearest neighbours of its codes, by LANTERN's published code.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...samplers.tokens.mulosd import islands as geometry
from ...samplers.tokens.mulosd.verification import nearest_codes
from .cases import Case, Check, exact, gathered, read_json, read_tensors, relative

GEOMETRY, NEIGHBOURS = "mulosd_geometry.json", "lantern_neighbours.safetensors"


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``."""
    out: list[Case] = []
    known = ((GEOMETRY, "tar/mulosd_geometry", _geometry), (NEIGHBOURS, "llamagen/lantern_neighbours", _nearest))
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
    islands = geometry.find_islands(region)
    yield exact(torch.from_numpy(region.ravel().nonzero()[0]), torch.tensor(case["R_X"], dtype=torch.int64))
    waves = geometry.waves_of_islands(islands, reach=case["window"] or case["W"])
    parts = (islands, 1, case["islands"]), (waves, 0, case["waves"])

    for computed, first, expected in parts:
        recorded = np.full(down.size, first - 1)
        for number, cells in enumerate(expected):
            recorded[cells] = first + number
        yield exact(torch.from_numpy(computed.ravel()), torch.from_numpy(recorded))


def _nearest(path: Path) -> Iterator[Case]:
    yield Case("llamagen/lantern_neighbours", partial(_distances, read_tensors(path)))


def _distances(data: dict[str, Tensor]) -> Iterator[Check]:
    """Compares distances, because the order of equally distant codes
    is arbitrary. The published table uses the stored codebook.
    """
    codes = data["codebook"]
    distance = (codes[:, None] - codes).norm(dim=-1)
    ours = nearest_codes(codes, data["nearest"].shape[1])
    yield exact(ours[:, 0], torch.arange(len(codes)))
    yield relative(distance.gather(1, ours[:, 1:].long()), distance.gather(1, data["nearest"].long()))
