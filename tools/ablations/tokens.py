"""Ablation tables of the demo's token models: two LlamaGens, PAR and ZipAR.

The checkpoints hold the default settings (``token_recipes.DEFAULTS``); a row lists the differences. Images of the 16 x
16 grid have 128 pixels and are averaged 2 x 2 for the judge, and so are the real and reconstructed images. *Rebuilt*
images are reconstructions of the VQ tokenizer at the size of the model.

The rows "ablation on LlamaGen" run PAR's schedules with a network that was not trained for them; PAR's authors (Wang et
al. 2025, arXiv 2412.15119) trained one network per schedule. These rows measure the effect of that training. The row of
the PAR without its sequential start measures the effect of the start for a network trained with it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.autoencoders import expect_codes, load_vq
from ...model_loaders.checkpoint import read_metadata
from ...model_loaders.llamagen import load_llamagen
from ...model_loaders.networks.autoencoder import VQModel
from ...model_loaders.networks.llama import TokenModel
from ...reports.record import Report
from ...samplers.conditioning import AnyCondition
from ...samplers.driver import finish
from ...samplers.registry import find
from ...samplers.settings import knobs
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import ADJACENT, NON_LOCAL
from ..training.quality import Figures
from ..training.recipes import RESOLUTION, to_rgb
from ..training.token_recipes import GPT_HIGH, GPT_LOW, PAR
from .tables import BATCH, TEST_SEED, Bench, Ground, Result, Row, Table, from_rgb

VQ = "vq"
# Batch size of the tokenizer.
_CHUNK = 25

_PLAIN = Row("LlamaGen", "llamagen", {}, GPT_LOW.name)
_N = PAR.config.regions
_NO_START = {"sequential_start": False}
_SCATTERED, _NEIGHBOURS = {"grouping": NON_LOCAL, "group": _N}, {"grouping": ADJACENT, "group": _N}
_ALL = {"top_p": 1.0}
_BY_ENTROPY = {"entropy_temperature": 1.0}
_WINDOWS = (8, 6, 4, 3, 2, 1)

TABLES: dict[str, Table] = {
    "llamagen": (
        Row("LlamaGen, 8 x 8", "llamagen", {}, GPT_LOW.name),
        Row("LlamaGen, 16 x 16", "llamagen", {}, GPT_HIGH.name),
        Row(f"PAR, {_N} regions, 8 x 8", "par", {}, PAR.name),
    ),
    "llamagen-settings": (
        *(Row(f"cfg {c:g}", "llamagen", {"cfg": c}, GPT_LOW.name) for c in (1.0, 1.5, 2.0, 3.0)),
        *(Row(f"top-p {p:g}", "llamagen", {"top_p": p}, GPT_LOW.name) for p in (0.7, 0.8, 0.9, 1.0)),
        # One truncation of the distribution at a time.
        *(
            Row(f"temperature {t:g}, top-p 1", "llamagen", {**_ALL, "temperature": t}, GPT_LOW.name)
            for t in (0.6, 0.7, 0.8, 0.9)
        ),
        *(Row(f"top-k {k}, top-p 1", "llamagen", {**_ALL, "top_k": k}, GPT_LOW.name) for k in (100, 20)),
    ),
    # Of the PAR, by temperature and strength.
    "entropy-strength": tuple(
        Row(f"temperature {t:g}, strength {e:g}", "par", {"temperature": t, "entropy_temperature": e}, PAR.name)
        for t in (1.0, 0.7, 0.5)
        for e in (0.0, 0.1, 0.25, 0.5, 1.0)
    ),
    # Each at its own temperature and at about 0.7 times that, with and without the published factor of the entropy.
    "entropy": (
        Row("LlamaGen, 8 x 8", "llamagen", {}, GPT_LOW.name),
        Row("temperature 0.85", "llamagen", {"temperature": 0.85}, GPT_LOW.name),
        Row("temperature 0.7", "llamagen", {"temperature": 0.7}, GPT_LOW.name),
        Row("temperature 0.7, by entropy", "llamagen", {"temperature": 0.7, **_BY_ENTROPY}, GPT_LOW.name),
        Row("PAR, 8 x 8", "par", {}, PAR.name),
        Row("PAR, temperature 0.85", "par", {"temperature": 0.85}, PAR.name),
        Row("PAR, temperature 0.7", "par", {"temperature": 0.7}, PAR.name),
        Row("PAR, temperature 0.7, by entropy", "par", {"temperature": 0.7, **_BY_ENTROPY}, PAR.name),
        Row("LlamaGen, 16 x 16 (temperature 0.7)", "llamagen", {}, GPT_HIGH.name),
        Row("16 x 16, temperature 0.5", "llamagen", {"temperature": 0.5}, GPT_HIGH.name),
        Row("16 x 16, temperature 0.5, by entropy", "llamagen", {"temperature": 0.5, **_BY_ENTROPY}, GPT_HIGH.name),
    ),
    "par": (
        _PLAIN,
        Row(f"PAR, {_N} regions", "par", {}, PAR.name),
        Row("PAR, no sequential start", "par", _NO_START, PAR.name),
        Row("ablation on LlamaGen: non-local", "par", _SCATTERED, GPT_LOW.name),
        Row("ablation on LlamaGen: non-local, no sequential start", "par", {**_SCATTERED, **_NO_START}, GPT_LOW.name),
        Row("ablation on LlamaGen: adjacent", "par", _NEIGHBOURS, GPT_LOW.name),
        Row("ablation on LlamaGen: adjacent, no sequential start", "par", {**_NEIGHBOURS, **_NO_START}, GPT_LOW.name),
        Row("ablation on LlamaGen: adjacent, n = 2", "par", {**_NEIGHBOURS, "group": 2}, GPT_LOW.name),
    ),
    "zipar": (
        Row("LlamaGen", "llamagen", {}, GPT_HIGH.name),
        Row(f"window {GPT_HIGH.grid} (a whole row: exact)", "zipar", {"window": GPT_HIGH.grid}, GPT_HIGH.name),
        *(Row(f"window {w}", "zipar", {"window": w}, GPT_HIGH.name) for w in _WINDOWS),
        Row("window 4, blanks seen (as published)", "zipar", {"window": 4, "mask_undecoded": False}, GPT_HIGH.name),
    ),
}


class TokenBench(Bench):
    """Rows of the demo's LlamaGens and PAR."""

    tables = TABLES

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32", batch: int = BATCH):
        super().__init__(ground, device, dtype, batch)
        self._models: dict[str, TokenModel] = {}
        self._floors: dict[int, dict[str, Figures]] = {}

    def needs(self, row: Row) -> tuple[str, ...]:
        return VQ, row.model

    @cached_property
    def vq(self) -> VQModel:
        """The tokenizer."""
        return load_vq(self.ground.file(VQ), device=self.device)

    def model(self, name: str) -> TokenModel:
        """A token model by the name of its checkpoint. Raises
        UserError if it is missing, or belongs to another tokenizer.
        """
        if name not in self._models:
            model = load_llamagen(self.ground.file(name), self.dtype, self.device)
            expect_codes(self.vq, model)
            self._models[name] = model
        return self._models[name]

    def settings(self, row: Row, common: Mapping[str, Any]) -> dict[str, Any]:
        defaults = json.loads(read_metadata(self.ground.file(row.model)).get("defaults", "{}"))
        names = knobs(find(row.sampler).settings)
        return {**{name: value for name, value in defaults.items() if name in names}, **common, **row.settings}

    @torch.no_grad()
    def floors(self, name: str) -> dict[str, Figures]:
        """Figures of real images and of their reconstructions, for every image size of a table."""
        out: dict[str, Figures] = {}
        for row in self.tables[name]:
            side = self.model(row.model).grid * self.vq.net.config.stride
            if side not in self._floors:
                real = self.ground.real(TEST_SEED + 1, side)  # scenes that the reference does not contain
                codes = (self.vq.net.encode(part.to(self.device))[1] for part in from_rgb(real).split(_CHUNK))
                rebuilt = np.concatenate([to_rgb(self.vq.net.decode_codes(part)) for part in codes])
                size = "" if side == RESOLUTION else f" {side}-pixel"
                made = {"real": self.ground.figures(real), "VQ-rebuilt": self.ground.figures(rebuilt)}
                self._floors[side] = {f"{name}{size}": figures for name, figures in made.items()}
            out.update(self._floors[side])

        return out

    def condition(self, row: Row, images: range) -> AnyCondition:
        """Condition of the images with these indices."""
        return self.ground.condition(images)

    def companions(self, row: Row, settings: Any) -> dict[str, Any]:
        """Further arguments of the row's sampler, by name."""
        return {}

    def draw(self, row: Row, settings: Any, images: range) -> tuple[np.ndarray, Report]:
        condition, draws = self.condition(row, images), PairedDraws(self.ground.seed, images)
        more, run = self.companions(row, settings), find(row.sampler).run
        codes, report = finish(run(self.model(row.model), condition, settings, draws, **more))
        return self.decode(codes), report

    def decode(self, codes: Tensor) -> np.ndarray:
        """Codes [n, G, G] to images uint8 [n, S, S, 3]."""
        return np.concatenate([to_rgb(self.vq.net.decode_codes(part)) for part in codes.split(_CHUNK)])

    def more(self, row: Row, made: Any, reports: Sequence[Report], result: Result) -> dict[str, Any]:
        first = reports[0]
        steps = first.counts["transformer_passes"]
        return {"model": row.model, "steps": steps, "tokens_a_step": first.tokens_per_pass}

    def work(self, result: Result) -> dict[str, str]:
        return {
            "steps (forwards)": str(result.more["steps"]),
            "tokens a forward": f"{result.more['tokens_a_step']:.2f}",
            "transformer rows an image": result.count("transformer_tokens"),
            "s an image": result.seconds_an_image,
            "cache kB an image": result.cache,
        }
