"""Samplers that claim plain MAR's distribution, and approximate ones that a test of it has to reject.

A case draws toy images (4 tokens of 2 channels, ``toy_models.py``) with lossless CSpD or with the speculative diffusion
head, and as many with plain MAR from independent noise, and gives the p-values of three two-sample tests
(``two_samples.py``). Its controls have the same models and settings:

- ``published``: CSpD's approximate mode; ``no alignment``: published mode, draft and target with noise of their own.
- ``careless``: a rejected diffusion step is drawn from the target's kernel instead of from the residual distribution.
- ``temperature + 2 %``: plain MAR at a temperature that is 2 % higher; shows how small a difference the test detects.

All seeds are fixed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from fastar_nodes.networks.mar import MARModel
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers import coupling, speculation
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from torch import Tensor
from toy_models import ManyImages, toy_mar
from two_samples import p_values

SEED, ALPHA = 90210, 0.001
# Images drawn together.
BATCH = 5000
_COMMON = {"steps": 3, "diffusion_steps": 6, "cfg": 2.0, "temperature": 1.0}
_CSPD = {"mode": "lossless", "prefill_ratio": 0.0, "draft_length": 2}
CARELESS, WARMER = "careless", "temperature + 2 %"
DRAFTS = {"target": lambda: toy_mar(), "near": lambda: toy_mar(perturbation=0.03), "far": lambda: toy_mar(seed=1)}


@dataclass(frozen=True)
class Case:
    """A sampler that claims plain MAR's distribution: its name, draft,
    settings that plain MAR has too, its own, and those of controls.
    """

    sampler: str
    draft: str = ""
    common: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Sampler, draft and all settings that are not every case's."""
        parts = [self.sampler, *([f"{self.draft} draft"] if self.draft else [])]
        return ", ".join(parts + [f"{k} {v:g}" for k, v in {**self.common, **self.settings}.items() if k not in _CSPD])


_PUBLISHED = {"published": {"mode": "published"}}
_UNALIGNED = {"no alignment": {"mode": "published", "alignment": False}}
_CARELESS: dict[str, Mapping[str, Any]] = {CARELESS: {}}
_WARMER: dict[str, Mapping[str, Any]] = {WARMER: {}}


def _cases() -> Iterator[Case]:
    yield Case("mar", "", {}, {"speculation": 3}, _CARELESS)
    yield Case("mar", "", {}, {"speculation": 6}, {**_CARELESS, **_WARMER})

    # A draft that is the target is always accepted; without alignment the published mode judges it nevertheless.
    yield Case("cspd", "target", {}, _CSPD, _UNALIGNED)
    yield Case("cspd", "near", {}, _CSPD, {**_CARELESS, **_PUBLISHED})
    yield Case("cspd", "near", {}, {**_CSPD, "speculation": 4}, _CARELESS)
    yield Case("cspd", "far", {}, _CSPD, {**_CARELESS, **_PUBLISHED})

    for common in ({"cfg": 1.0}, {"temperature": 1.3}):
        yield Case("mar", "", common, {"speculation": 6}, {**_CARELESS, **_WARMER})
        yield Case("cspd", "target", common, _CSPD, _UNALIGNED)
        yield Case("cspd", "near", common, _CSPD, _PUBLISHED)
        yield Case("cspd", "far", common, _CSPD, _CARELESS)


CASES = tuple(_cases())


@contextmanager
def careless_coupling() -> Iterator[None]:
    """Within it, a rejected diffusion step is drawn from the target's kernel p instead of from max(0, p - q)."""

    def careless(
        draft: Tensor, q: Any, p: Any, uniforms: Tensor, proposals: coupling.Proposals | None = None
    ) -> coupling.Coupled:
        if proposals is None:
            right = coupling.couple(draft, q, p, uniforms)
            return right._replace(is_sample=right.accepted)
        drawn = torch.where(torch.isneginf(p.log_std), p.mean, p.mean + p.log_std.exp() * proposals.normals[:, 0])
        none = torch.zeros(len(draft), dtype=torch.bool)
        return coupling.Coupled(drawn, none, ~none)

    learned = speculation.LEARNED._replace(function=careless)
    with mock.patch.object(speculation, "LEARNED", learned), mock.patch.object(speculation, "couple", careless):
        yield


@lru_cache
def _model(name: str) -> MARModel:
    return DRAFTS[name]()


def draw(key: str, draws: int, sampler: str, draft: str, settings: Mapping[str, Any]) -> tuple[Tensor, dict[str, int]]:
    """Latents as vectors fp32 [draws, 8] of images of the toy
    target, and the report's counts, summed; ``key`` names the noise.
    """
    entry, counts = SAMPLERS[sampler], dict[str, int]()
    more: dict[str, Any] = {"draft": _model(draft)} if draft else {}
    parts = []

    for at in range(0, draws, BATCH):
        n = min(BATCH, draws - at)
        noise = ManyImages(f"{SEED}/{key}/{at}", n)
        done: Any = finish(entry.run(_model("target"), from_ids([1] * n), entry.settings(**settings), noise, **more))
        parts.append(done.latents.flatten(1))
        for name, count in done.report.counts.items():
            counts[name] = counts.get(name, 0) + count

    return torch.cat(parts), counts


class Comparisons:
    """The cases' tests with a number of draws each; plain MAR is drawn once for all cases with the same settings."""

    def __init__(self, draws: int):
        self.draws = draws
        self._plain: dict[str, Tensor] = {}

    def plain(self, common: Mapping[str, Any]) -> Tensor:
        """Plain MAR's draws, fp32 [draws, 8]."""
        key = f"plain {sorted(common.items())}"
        if key not in self._plain:
            self._plain[key] = draw(key, self.draws, "mar", "", {**_COMMON, **common})[0]
        return self._plain[key]

    def control(self, case: Case, name: str) -> float:
        """Smallest p-value of one of a case's controls."""
        settings, sampler, draft = {**_COMMON, **case.common}, case.sampler, case.draft
        if name == WARMER:
            settings["temperature"] *= 1.02
            sampler, draft = "mar", ""
        else:
            settings |= {**case.settings, **case.controls[name]}

        with careless_coupling() if name == CARELESS else nullcontext():
            found, _ = draw(f"{case.title}/{name}", self.draws, sampler, draft, settings)
        return min(p_values(self.plain(case.common), found).values())

    def case(self, case: Case) -> tuple[dict[str, float], dict[str, int]]:
        """p-values by test of a case alone, without its controls, and the report's counts."""
        settings = {**_COMMON, **case.common, **case.settings}
        found, counts = draw(case.title, self.draws, case.sampler, case.draft, settings)
        return p_values(self.plain(case.common), found), counts
