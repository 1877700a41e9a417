"""Ablation tables of the demo's Tar on held-out prompts.

The codes of a prompt are generated once per setting of the language model, so rows that differ in the sampler alone
decode the same codes. The column *s an image* is the time of the de-tokenizer; *prompt s an image* is that of the
language model. Prompts are defined in ``captions.py``, figures in ``quality.py``.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...model_loaders.autoencoders import expect_codes
from ...model_loaders.checkpoint import read_metadata
from ...model_loaders.networks.llama import TokenModel
from ...model_loaders.networks.ta_tok import TATokModel
from ...model_loaders.networks.tar import TarModel
from ...model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
from ...reports.record import Report
from ...reports.table import figure
from ...samplers.conditioning import AnyCondition, CodeCondition
from ...samplers.driver import finish
from ...samplers.settings import knobs, make
from ...samplers.tokens.conditioning import features_of
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import DETAILS, TarPromptSettings
from ...samplers.tokens.tar import tar_prompt
from ..training import picture_book
from ..training.captions import UNSAID, Wishes, wishes
from ..training.judge import read
from ..training.picture_book import Scenes
from ..training.quality import Figures, frechet, prompt_agreement, shrunk
from ..training.recipes import RESOLUTION
from ..training.tar_recipes import DTOK_HIGH, DTOK_LOW
from .mulosd import RepairBench, rows
from .tables import BATCH, TEST_SEED, Ground, Result, Row, Table
from .tokens import TokenBench

LANGUAGE, TA_TOK = "tar", "ta-tok"
# Value of the prompt setting "codes": TA-Tok's codes of real images, without the language model.
OF_PICTURES = "of real images"
# Parameters of a prompt besides the object.
_SAID = ("colour", "place", "size", "time")


def _tar(title: str, model: str = DTOK_LOW.name, prompt: dict[str, Any] | None = None, **settings: Any) -> Row:
    return Row(title, "tar", settings, model, prompt or {})


TABLES: dict[str, Table] = {
    "tar": tuple(
        _tar(f"{what}{name} codes, {size}", model, {"detail": detail, **more})
        for what, more in (("", {}), ("an image's own ", {"codes": OF_PICTURES}))
        for size, model in (("8 x 8", DTOK_LOW.name), ("16 x 16", DTOK_HIGH.name))
        for name, detail in zip(("all", "fewer", "fewest"), DETAILS, strict=True)
    ),
    "tar-settings": (
        *(_tar(f"prompt: temperature {t:g}", prompt={"temperature": t}) for t in (0.0, 0.5, 0.7, 0.9, 1.0)),
        *(_tar(f"prompt: top-p {p:g}", prompt={"top_p": p}) for p in (0.8, 0.9, 0.95, 1.0)),
        *(_tar(f"prompt: repetition penalty {r:g}", prompt={"repetition_penalty": r}) for r in (1.0, 1.05, 1.1, 1.3)),
        *(_tar(f"cfg {c:g}", cfg=c) for c in (1.0, 1.5, 2.0, 3.0, 4.0)),
        *(_tar(f"temperature {t:g}", temperature=t) for t in (0.7, 0.9, 1.0)),
        *(_tar(f"top-p {p:g}", top_p=p) for p in (0.7, 0.8, 0.9, 1.0)),
    ),
}


def fulfilling_scenes(wanted: Wishes, seed: int) -> Scenes:
    """Scenes of the book ``seed`` that fulfil the requests, one each; unstated parameters are those of the book."""
    s = picture_book.scenes(seed, len(wanted), labels=wanted.label.tolist())
    said = {name: np.where(getattr(wanted, name) == UNSAID, getattr(s, name), getattr(wanted, name)) for name in _SAID}
    # Place and size change; the random offset from their centre remains.
    x = s.x + ((said["place"] - s.place) * picture_book.PLACE_STEP).astype(np.float32)
    scales = np.array(picture_book.SCALES, np.float32)
    return replace(s, **said, x=x, scale=s.scale + scales[said["size"]] - scales[s.size])


class PromptGround(Ground):
    """Shared by all rows of a run: held-out prompts, the judge, and real images that fulfil the prompts."""

    def __init__(self, ground: Ground):
        super().__init__(ground.images, ground.checkpoints, ground.seed)
        self.wanted = wishes(self.images, self.seed)
        self.prompts = self.wanted.captions()

    def real(self, seed: int, side: int = RESOLUTION) -> np.ndarray:
        """Real images that fulfil the prompts, uint8 [images, side, side, 3]."""
        return picture_book.render(fulfilling_scenes(self.wanted, seed), side)[0]

    def figures(self, rgb: np.ndarray) -> Figures:
        """Figures of images uint8 [images, S, S, 3] of all prompts."""
        v = read(self.judge, shrunk(rgb))
        shares = {**prompt_agreement(v.scenes, self.wanted), "whole": float((v.whole > 0.5).mean())}
        return Figures(len(rgb), shares, frechet(v.features, self.reference(rgb.shape[1])))


class TarBench(TokenBench):
    """Rows of the demo's Tar: language model, TA-Tok and de-tokenizers, with the VQ tokenizer."""

    tables = TABLES
    ground: PromptGround

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32", batch: int = BATCH):
        super().__init__(PromptGround(ground), device, dtype, batch)
        self._codes: dict[str, tuple[CodeCondition, float | None]] = {}

    def needs(self, row: Row) -> tuple[str, ...]:
        return (*super().needs(row), TA_TOK, *(() if "codes" in row.prompt else (LANGUAGE,)))

    @cached_property
    def language(self) -> TarModel:
        """The language model."""
        return load_tar(self.ground.file(LANGUAGE), self.dtype, self.device)

    @cached_property
    def ta_tok(self) -> TATokModel:
        """The semantic tokenizer."""
        return load_ta_tok(self.ground.file(TA_TOK), self.dtype, self.device)

    def model(self, name: str) -> TokenModel:
        if name not in self._models:
            model = load_detokenizer(self.ground.file(name), self.dtype, self.device, ta_tok=self.ta_tok)
            expect_codes(self.vq, model)
            self._models[name] = model
        return self._models[name]

    def prompt_settings(self, row: Row) -> TarPromptSettings:
        """Settings of the language model: the defaults of its checkpoint, updated by the row."""
        names = knobs(TarPromptSettings)
        metadata = {} if "codes" in row.prompt else read_metadata(self.ground.file(LANGUAGE))
        defaults = json.loads(metadata.get("defaults", "{}"))
        own = {name: value for name, value in row.prompt.items() if name != "codes"}
        return make(TarPromptSettings, {**{name: value for name, value in defaults.items() if name in names}, **own})

    @torch.no_grad()
    def codes(self, row: Row) -> tuple[CodeCondition, float | None]:
        """Codes of all images of a row and the seconds of the language model; computed once per prompt setting."""
        settings, real = self.prompt_settings(row), "codes" in row.prompt
        key = f"{settings} {real}"
        if key in self._codes:
            return self._codes[key]
        prompts, seconds, parts = self.ground.prompts, 0.0, []
        if real:
            # Images that the reference does not contain.
            x = torch.from_numpy(self.ground.real(TEST_SEED + 1)).permute(0, 3, 1, 2).float() / 255
            parts = list(self.ta_tok.codes(x, DETAILS.index(settings.detail) + 1).cpu())
        else:
            for at in range(0, len(prompts), BATCH):
                part = prompts[at : at + BATCH]
                draws = PairedDraws(self.ground.seed, range(at, at + len(part)))
                done = finish(tar_prompt(self.language, part, settings, draws))
                parts += list(done.condition.codes)
                seconds += done.report.seconds

        size = self.ta_tok.net.config.codes if real else self.language.special.codes
        self._codes[key] = CodeCondition(tuple(parts), tuple(prompts), size), None if real else seconds

        return self._codes[key]

    def condition(self, row: Row, images: range) -> AnyCondition:
        codes, part = self.codes(row)[0], slice(images.start, images.stop)
        own = CodeCondition(codes.codes[part], codes.names[part], codes.size)
        return features_of(own, self.ta_tok)  # outside the sampler, so that its seconds exclude it

    def more(self, row: Row, made: Any, reports: Sequence[Report], result: Result) -> dict[str, Any]:
        """Settings of the language model, its seconds an image (None without it), semantic codes an
        image, and passes.
        """
        codes, seconds = self.codes(row)
        return {
            "model": row.model,
            "prompt": vars(self.prompt_settings(row)) | row.prompt,
            "codes": len(codes.codes[0]),
            "prompt_seconds": None if seconds is None else seconds / len(codes),
            "steps": reports[0].counts["transformer_passes"],
        }

    def work(self, result: Result) -> dict[str, str]:
        more = result.more
        cells = {"codes": str(more["codes"]), "prompt s an image": figure(more["prompt_seconds"], ".3f")}
        return cells | {"steps (forwards)": str(more["steps"]), "s an image": result.seconds_an_image}


class TarRepairBench(RepairBench, TarBench):
    """Rows of the demo's Tar, with the small de-tokenizer as the draft model of the large one."""

    tables = {"mulosd": rows(Row("Tar", "tar", {}, DTOK_HIGH.name))}
    drafter, small = DTOK_LOW.name, DTOK_LOW.grid
