"""Ablations of the demo's token models: LlamaGen of two sizes, PAR and ZipAR.

What suits a model stands in its file (``token_recipes.DEFAULTS``), so a row says only in what it differs. The judge reads 64
pixels: pictures of the 16 x 16 grid, which have 128, are averaged 2 x 2 before they are judged, and so are the real and the
rebuilt ones beside them. *Rebuilt* means through the VQ tokenizer, at the model's size.

On the plain LlamaGen, PAR's schedules are run with a network that was trained for none of them; PAR's authors (Wang et al.
2025, arXiv 2412.15119) trained one for each. So those rows say what training for the groups is worth, and the PAR's own row
without its sequential start what the start is worth to a network that knows it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...model_loaders.autoencoders import expect_codes, load_vq
from ...model_loaders.checkpoint import read_metadata
from ...model_loaders.llamagen import load_llamagen
from ...model_loaders.networks.gpt import TokenModel
from ...model_loaders.networks.vq import VQModel
from ...reports.record import Report
from ...samplers.conditioning import AnyCondition
from ...samplers.driver import finish
from ...samplers.registry import find
from ...samplers.settings import knobs
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import ADJACENT, NON_LOCAL
from ..training.recipes import RESOLUTION, to_rgb
from ..training.token_recipes import GPT_HIGH, GPT_LOW, PAR
from .tables import SEED, TEST_SEED, Bench, Ground, Judged, Result, Row, Table, from_rgb

VQ = "vq"
# Pictures that go through the tokenizer at once.
_CHUNK = 25

_PLAIN = Row("LlamaGen", "llamagen", {}, GPT_LOW.name)
_N = PAR.config.regions
_NO_START = {"sequential_start": False}
_SCATTERED, _NEIGHBOURS = {"grouping": NON_LOCAL, "group": _N}, {"grouping": ADJACENT, "group": _N}
_ALL = {"top_p": 1.0}
_WINDOWS = (8, 6, 4, 3, 2, 1)

TABLES: dict[str, Table] = {
    "llamagen": (
        {},
        (
            Row("LlamaGen, 8 x 8", "llamagen", {}, GPT_LOW.name),
            Row("LlamaGen, 16 x 16", "llamagen", {}, GPT_HIGH.name),
            Row(f"PAR, {_N} regions, 8 x 8", "par", {}, PAR.name),
        ),
    ),
    "llamagen-settings": (
        {},
        (
            *(Row(f"cfg {c:g}", "llamagen", {"cfg": c}, GPT_LOW.name) for c in (1.0, 1.5, 2.0, 3.0)),
            *(Row(f"top-p {p:g}", "llamagen", {"top_p": p}, GPT_LOW.name) for p in (0.7, 0.8, 0.9, 1.0)),
            # One way of leaving out what is unlikely at a time.
            *(
                Row(f"temperature {t:g}, top-p 1", "llamagen", {**_ALL, "temperature": t}, GPT_LOW.name)
                for t in (0.6, 0.7, 0.8, 0.9)
            ),
            *(Row(f"top-k {k}, top-p 1", "llamagen", {**_ALL, "top_k": k}, GPT_LOW.name) for k in (100, 20)),
        ),
    ),
    "par": (
        {},
        (
            _PLAIN,
            Row(f"PAR, {_N} regions", "par", {}, PAR.name),
            Row("PAR, no sequential start", "par", _NO_START, PAR.name),
            Row("ablation on LlamaGen: non-local", "par", _SCATTERED, GPT_LOW.name),
            Row(
                "ablation on LlamaGen: non-local, no sequential start", "par", {**_SCATTERED, **_NO_START}, GPT_LOW.name
            ),
            Row("ablation on LlamaGen: adjacent", "par", _NEIGHBOURS, GPT_LOW.name),
            Row(
                "ablation on LlamaGen: adjacent, no sequential start", "par", {**_NEIGHBOURS, **_NO_START}, GPT_LOW.name
            ),
            Row("ablation on LlamaGen: adjacent, n = 2", "par", {**_NEIGHBOURS, "group": 2}, GPT_LOW.name),
        ),
    ),
    "zipar": (
        {},
        (
            Row("LlamaGen", "llamagen", {}, GPT_HIGH.name),
            Row(f"window {GPT_HIGH.grid} (a whole row: exact)", "zipar", {"window": GPT_HIGH.grid}, GPT_HIGH.name),
            *(Row(f"window {w}", "zipar", {"window": w}, GPT_HIGH.name) for w in _WINDOWS),
            Row("window 4, blanks seen (as published)", "zipar", {"window": 4, "mask_undecoded": False}, GPT_HIGH.name),
        ),
    ),
}


@dataclass(frozen=True)
class TokenResult(Result):
    """A row's figures, its model, how many passes of the transformer a batch takes, and how many tokens of an image each decides."""

    model: str
    steps: int
    tokens_a_step: float

    def work(self) -> dict[str, str]:
        """What it took: a column's heading to the cell. The cache is the keys and values of a picture's tokens."""
        images = self.figures.images
        return {
            "steps (forwards)": str(self.steps),
            "tokens a forward": f"{self.tokens_a_step:.2f}",
            "transformer rows an image": f"{self.counts['transformer_tokens'] / images:.0f}",
            "s an image": f"{self.seconds / images:.3f}",
            "cache kB an image": f"{self.counts['cache_bytes'] / images / 1000:.0f}",
        }


class TokenBench(Bench):
    """The demo's LlamaGens and its PAR, with their tokenizer."""

    tables = TABLES

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32"):
        super().__init__(ground, device, dtype)
        self._models: dict[str, TokenModel] = {}
        self._floors: dict[int, dict[str, Judged]] = {}

    def needs(self, row: Row) -> tuple[str, ...]:
        return VQ, row.model

    @cached_property
    def vq(self) -> VQModel:
        """The tokenizer."""
        return load_vq(self.ground.file(VQ), device=self.device)

    def model(self, name: str) -> TokenModel:
        """One of the demo's models, by its file's name.

        Raises:
            UserError: its file is missing, or is not of this tokenizer.
        """
        if name not in self._models:
            model = load_llamagen(self.ground.file(name), self.dtype, self.device)
            expect_codes(self.vq, model)
            self._models[name] = model
        return self._models[name]

    def settings(self, row: Row, common: dict[str, Any]) -> dict[str, Any]:
        stated = json.loads(read_metadata(self.ground.file(row.model)).get("defaults", "{}"))
        known = knobs(find(row.sampler).settings)
        return {**{name: value for name, value in stated.items() if name in known}, **common, **row.settings}

    @torch.no_grad()
    def floors(self, name: str) -> dict[str, Judged]:
        """Figures of real pictures and of rebuilt ones, judged like generated ones, for every size of picture in a table."""
        out: dict[str, Judged] = {}
        for row in self.tables[name][1]:
            side = self.model(row.model).grid * self.vq.net.config.stride
            if side not in self._floors:
                real = self.ground.real(TEST_SEED + 1, side)  # other scenes than the reference's
                codes = (self.vq.net.encode(part.to(self.device))[1] for part in from_rgb(real).split(_CHUNK))
                rebuilt = np.concatenate([to_rgb(self.vq.net.decode_codes(part)) for part in codes])
                size = "" if side == RESOLUTION else f" {side}-pixel"
                self._floors[side] = {
                    f"real{size}": self.ground.figures(real),
                    f"VQ-rebuilt{size}": self.ground.figures(rebuilt),
                }
            out.update(self._floors[side])
        return out

    def condition(self, row: Row, images: range) -> AnyCondition:
        """What a row draws of the images of these numbers."""
        return self.ground.condition(images)

    def companions(self, row: Row, settings: Any) -> dict[str, Any]:
        """What the row's sampler takes beside its model, by name."""
        return {}

    def draw(self, row: Row, settings: Any, images: range) -> tuple[np.ndarray, Report]:
        condition, draws = self.condition(row, images), PairedDraws(SEED, images)
        done = finish(
            find(row.sampler).run(
                self.model(row.model), condition, settings, draws, SEED, **self.companions(row, settings)
            )
        )
        return np.concatenate(
            [to_rgb(self.vq.net.decode_codes(part)) for part in done.codes.split(_CHUNK)]
        ), done.report

    def result(self, row: Row, settings: dict[str, Any], judged: Any, reports: Sequence[Report]) -> Result:
        plain = super().result(row, settings, judged, reports)
        steps, together = reports[0].counts["transformer_passes"], reports[0].tokens_per_pass
        assert together is not None
        return TokenResult(**vars(plain), model=row.model, steps=steps, tokens_a_step=together)
