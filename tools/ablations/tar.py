"""Ablations of the demo's Tar: prompts that no training has read, and whether the pictures show what they ask for.

A prompt's codes are written once, whatever draws from them, so rows that differ in a sampler alone draw the same codes. Their
seconds are the de-tokenizer's; those of the language model have a column of their own where a table is about it. Prompts,
and what their figures mean, are in ``captions.py`` and ``quality.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...model_loaders.autoencoders import expect_codes
from ...model_loaders.checkpoint import read_metadata
from ...model_loaders.networks.gpt import TokenModel
from ...model_loaders.networks.qwen import TarModel
from ...model_loaders.networks.ta_tok import TATokModel
from ...model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
from ...reports.record import Report
from ...samplers.conditioning import AnyCondition, CodeCondition
from ...samplers.settings import knobs, make
from ...samplers.tokens.conditioning import features_of
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import DETAILS, TarPromptSettings
from ...samplers.tokens.tar import finish_prompt, tar_prompt
from ..training import picture_book
from ..training.captions import UNSAID, Wishes, wishes
from ..training.judge import read
from ..training.picture_book import Scenes
from ..training.quality import Agreement, frechet, percent, prompt_agreement, shrunk
from ..training.recipes import RESOLUTION
from ..training.tar_recipes import DTOK_HIGH, DTOK_LOW
from .mulosd import RepairBench, rows
from .tables import BATCH, SEED, TEST_SEED, Bench, Ground, Result, Row, Table
from .tokens import TokenBench

LANGUAGE, TA_TOK = "tar", "ta-tok"
# Among a row's settings of the prompt: the codes are TA-Tok's of a real picture, and nothing is written.
OF_PICTURES = "of real pictures"
# What a prompt may say of its thing.
_SAID = ("colour", "place", "size", "time")


def _tar(title: str, model: str = DTOK_LOW.name, prompt: dict[str, Any] | None = None, **settings: Any) -> Row:
    return Row(title, "tar", settings, model, prompt or {})


TABLES: dict[str, Table] = {
    "tar": (
        {},
        tuple(
            _tar(f"{what}{name} codes, {size}", model, {"detail": detail, **more})
            for what, more in (("", {}), ("a picture's own ", {"codes": OF_PICTURES}))
            for size, model in (("8 x 8", DTOK_LOW.name), ("16 x 16", DTOK_HIGH.name))
            for name, detail in zip(("all", "fewer", "fewest"), DETAILS, strict=True)
        ),
    ),
    "tar-settings": (
        {},
        (
            *(_tar(f"prompt: temperature {t:g}", prompt={"temperature": t}) for t in (0.0, 0.5, 0.7, 0.9, 1.0)),
            *(_tar(f"prompt: top-p {p:g}", prompt={"top_p": p}) for p in (0.8, 0.9, 0.95, 1.0)),
            *(
                _tar(f"prompt: repetition penalty {r:g}", prompt={"repetition_penalty": r})
                for r in (1.0, 1.05, 1.1, 1.3)
            ),
            *(_tar(f"cfg {c:g}", cfg=c) for c in (1.0, 1.5, 2.0, 3.0, 4.0)),
            *(_tar(f"temperature {t:g}", temperature=t) for t in (0.7, 0.9, 1.0)),
            *(_tar(f"top-p {p:g}", top_p=p) for p in (0.7, 0.8, 0.9, 1.0)),
        ),
    ),
}


# ------------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class PromptFigures:
    """Figures of pictures of prompts; see ``quality.py``."""

    agreement: Agreement
    whole: float
    frechet: float

    @property
    def images(self) -> int:
        """How many they are of."""
        return self.agreement.images

    def cells(self) -> dict[str, str]:
        """A table's columns: heading to cell."""
        a = self.agreement
        shares = {
            "thing %": a.thing,
            "colour %": a.colour,
            "both %": a.both,
            "place %": a.place,
            "size %": a.size,
            "time %": a.time,
            "all %": a.everything,
            "whole %": self.whole,
        }
        return {**{heading: percent(share) for heading, share in shares.items()}, "Frechet": f"{self.frechet:.2f}"}


def as_wished(wanted: Wishes, seed: int) -> Scenes:
    """Pictures of the book ``seed`` that show what was asked for, one a wish; what is left open is the book's own."""
    s = picture_book.scenes(seed, len(wanted), labels=wanted.label.tolist())
    said = {name: np.where(getattr(wanted, name) == UNSAID, getattr(s, name), getattr(wanted, name)) for name in _SAID}
    # Place and size move with their names; how far a thing stands from there stays.
    x = s.x + ((said["place"] - s.place) * picture_book.PLACE_STEP).astype(np.float32)
    scales = np.array(picture_book.SCALES, np.float32)
    return replace(s, **said, x=x, scale=s.scale + scales[said["size"]] - scales[s.size])


class PromptGround(Ground):
    """What all rows share: prompts that no training has read, the judge, and real pictures of what they ask for.

    Args:
        ground: of labels; its number of pictures and its folder are taken.
    """

    def __init__(self, ground: Ground):
        super().__init__(ground.images, ground.checkpoints)
        self.wanted = wishes(self.images, SEED)
        self.prompts = self.wanted.captions()

    def real(self, seed: int, side: int = RESOLUTION) -> np.ndarray:
        """The book's own pictures of what the prompts ask for, uint8 [images, side, side, 3]."""
        return picture_book.render(as_wished(self.wanted, seed), side)[0]

    def figures(self, rgb: np.ndarray) -> PromptFigures:
        """Figures of pictures uint8 [images, S, S, 3] of all prompts, beside real ones of that size."""
        seen = read(self.judge, shrunk(rgb))
        agreement = prompt_agreement(self.judge, rgb, self.wanted)
        return PromptFigures(
            agreement, float((seen.whole > 0.5).mean()), frechet(seen.features, self.reference(rgb.shape[1]))
        )


# ------------------------------------------------------------------------------------------------ the benches


@dataclass(frozen=True)
class PromptResult(Result):
    """A row's figures, what draws, how its codes came about, and how many passes a picture takes.

    Attributes:
        model: by its file's name.
        prompt: settings of what writes the codes.
        codes: how many an image has.
        prompt_seconds: what writing took an image; None where nothing was written.
        steps: passes of the de-tokenizer.
    """

    model: str
    prompt: dict[str, Any]
    codes: int
    prompt_seconds: float | None
    steps: int

    def work(self) -> dict[str, str]:
        """What it took: a column's heading to the cell."""
        return {
            "codes": str(self.codes),
            "prompt s an image": "" if self.prompt_seconds is None else f"{self.prompt_seconds:.3f}",
            "steps (forwards)": str(self.steps),
            "s an image": f"{self.seconds / self.figures.images:.3f}",
        }


class TarBench(TokenBench):
    """The demo's Tar: its language model, TA-Tok and de-tokenizers, with the tokenizer of the LlamaGens."""

    tables = TABLES
    ground: PromptGround

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32"):
        super().__init__(PromptGround(ground), device, dtype)
        self._codes: dict[str, tuple[CodeCondition, float | None]] = {}

    def needs(self, row: Row) -> tuple[str, ...]:
        return (*super().needs(row), TA_TOK, *(() if "codes" in row.prompt else (LANGUAGE,)))

    @cached_property
    def language(self) -> TarModel:
        """What writes codes."""
        return load_tar(self.ground.file(LANGUAGE), self.dtype, self.device)

    @cached_property
    def ta_tok(self) -> TATokModel:
        """What codes mean."""
        return load_ta_tok(self.ground.file(TA_TOK), self.dtype, self.device)

    def model(self, name: str) -> TokenModel:
        if name not in self._models:
            model = load_detokenizer(self.ground.file(name), self.dtype, self.device, ta_tok=self.ta_tok)
            expect_codes(self.vq, model)
            self._models[name] = model
        return self._models[name]

    def asked(self, row: Row) -> TarPromptSettings:
        """How a row's codes are written: as the language model's file says, but for what the row sets.

        Raises:
            UserError: no such setting, or out of range.
        """
        known = knobs(TarPromptSettings)
        stated = (
            {} if "codes" in row.prompt else json.loads(read_metadata(self.ground.file(LANGUAGE)).get("defaults", "{}"))
        )
        own = {name: value for name, value in row.prompt.items() if name != "codes"}
        return make(TarPromptSettings, {**{name: value for name, value in stated.items() if name in known}, **own})

    @torch.no_grad()
    def codes(self, row: Row) -> tuple[CodeCondition, float | None]:
        """Codes of all images of a row, and the seconds that writing them took; once for all rows that have the same."""
        settings, real = self.asked(row), "codes" in row.prompt
        key = f"{settings} {real}"
        if key in self._codes:
            return self._codes[key]
        prompts, seconds, parts = self.ground.prompts, 0.0, []
        if real:
            # Other pictures than those that the drawn ones are compared with.
            x = torch.from_numpy(self.ground.real(TEST_SEED + 1)).permute(0, 3, 1, 2).float() / 255
            parts = list(self.ta_tok.codes(x, DETAILS.index(settings.detail) + 1).cpu())
        else:
            for at in range(0, len(prompts), BATCH):
                some = prompts[at : at + BATCH]
                done = finish_prompt(
                    tar_prompt(self.language, some, settings, PairedDraws(SEED, range(at, at + len(some))), SEED)
                )
                parts += list(done.condition.codes)
                seconds += done.report.seconds
        size = self.ta_tok.net.config.codes if real else self.language.marks.codes
        self._codes[key] = CodeCondition(tuple(parts), tuple(prompts), size), None if real else seconds
        return self._codes[key]

    def condition(self, row: Row, images: range) -> AnyCondition:
        codes = self.codes(row)[0]
        some = CodeCondition(
            codes.codes[images.start : images.stop], codes.names[images.start : images.stop], codes.size
        )
        return features_of(some, self.ta_tok)  # here, so that no sampler's seconds hold it

    def result(self, row: Row, settings: dict[str, Any], judged: Any, reports: Sequence[Report]) -> Result:
        plain, (codes, seconds) = Bench.result(self, row, settings, judged, reports), self.codes(row)
        return PromptResult(
            **vars(plain),
            model=row.model,
            prompt=vars(self.asked(row)) | row.prompt,
            codes=len(codes.codes[0]),
            prompt_seconds=None if seconds is None else seconds / len(codes),
            steps=reports[0].counts["transformer_passes"],
        )


class TarRepairBench(RepairBench, TarBench):
    """The demo's Tar, whose small de-tokenizer drafts for the large one."""

    tables = {"mulosd": ({}, rows(Row("Tar", "tar", {}, DTOK_HIGH.name)))}
    drafter, small = DTOK_LOW.name, DTOK_LOW.grid
