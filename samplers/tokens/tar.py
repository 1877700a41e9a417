"""Tar: a language model generates the semantic codes of an image, which condition a de-tokenizer.

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned Representations"
(arXiv 2506.18898). Logits are computed for the ids of image codes only, so that exactly the requested number of codes is
generated; the published program parses them from the text, and truncates or pads. This stage has no guidance.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.tar import TarModel
from ...reports.record import Report
from ..conditioning import CodeCondition
from .conditioning import PreparedCondition
from .draws import PairedDraws
from .llamagen import decode
from .loop import TokenRun, TokenStep, new_report
from .schedule import raster
from .settings import DETAILS, TarPromptSettings, TokenSettings


class TarPrompted(NamedTuple):
    """Result of the sampler: codes int64 [B, n], the report, and the codes as the condition of a de-tokenizer."""

    codes: Tensor
    report: Report
    condition: CodeCondition


def tar_prompt(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, noise: PairedDraws, seed: int | None = None
) -> Generator[TokenStep, None, TarPrompted]:
    """Generate the semantic codes of prompts, one image per prompt. Equal prompts are run once.

    Repetition penalty, temperature, top-k and top-p are applied in this order.

    Args:
        model: the language model with its metadata.
        prompts: B texts as typed; see :meth:`TarModel.prompt` for the template.
        settings: see :class:`TarPromptSettings`.
        noise: draws of B images; code i is drawn from stream "code", cell i.
        seed: only recorded in the report.

    Raises:
        UserError: no prompt, an invalid one, a scale that the model does not have, or draws for another number of images.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError("text: it is no list of prompts; ask for at least one image.")
    if len(noise) != len(prompts):
        raise UserError(f"text: it asks for {len(prompts)} images, the draws are for {len(noise)}.")
    scale, distinct = DETAILS.index(settings.detail), list(dict.fromkeys(prompts))
    texts = [model.prompt(text, scale) for text in distinct]
    settings = replace(settings, repetition_penalty=settings.repetition_penalty or model.repetition_penalty)
    report, clock = new_report("tar-prompt", model, settings, seed, len(prompts))
    device, counts = model.net.compute_device, [len(text) for text in texts]
    ids = torch.tensor([text + [0] * (max(counts) - len(text)) for text in texts]).to(device)
    lengths = None if min(counts) == max(counts) else torch.tensor(counts).to(device)
    images = torch.tensor([distinct.index(text) for text in prompts]).to(device)
    condition = PreparedCondition(ids, lengths, images if len(distinct) < len(prompts) else None)
    plain = TokenSettings(cfg=1.0, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    side, penalty = model.sides[scale], settings.repetition_penalty
    run = TokenRun(model.net, side, condition, plain, noise, report, clock, None, "code", model.span, penalty)
    codes, report = yield from decode(run, raster(side), settings.parallel if side > 1 else 0)
    codes = codes.flatten(1)
    # The condition is on the host: the language model's device may be needed for the de-tokenizer.
    return TarPrompted(codes, report, CodeCondition(tuple(codes.cpu().clone()), tuple(prompts), model.special.codes))
