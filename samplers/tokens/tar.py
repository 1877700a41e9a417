"""Tar: a language model writes the semantic codes of a picture, which a de-tokenizer draws from.

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned Representations"
(arXiv 2506.18898). Only the ids of image codes are ever considered, so exactly as many codes come out as were asked for; the
published program cuts and fills what it finds in the text. There is no guidance at this stage.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.qwen import TarModel
from ...reports.record import PLAIN, Clock, Report
from ..conditioning import CodeCondition
from ..driver import PauseClock
from .draws import Draws, allowed
from .settings import DETAILS, TarPromptSettings


@dataclass(frozen=True, eq=False)
class CodeStep:
    """What the sampler yields after every code.

    Attributes:
        done, total: passes of the language model; one decides a code of every image.
        codes: int64 [B, n] so far; 0 where undecided.
        report: the running report (its counts so far).
    """

    done: int
    total: int
    codes: Tensor
    report: Report


class TarPrompted(NamedTuple):
    """The sampler's result: codes int64 [B, n], the report, and the codes as what a de-tokenizer draws from."""

    codes: Tensor
    report: Report
    condition: CodeCondition


# As for token samplers, a driver may send the seconds it spent since the last step.
TarPrompt = Generator[CodeStep, "float | None", TarPrompted]


def finish_prompt(sampler: TarPrompt) -> TarPrompted:
    """Run to the end, ignoring the steps."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits fp32 [..., V] whose values that are ``seen`` (bool [..., V]) are divided by the penalty, or multiplied where they are
    negative (Keskar et al. 2019, CTRL, as Hugging Face has it)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def tar_prompt(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, noise: Draws, seed: int | None = None
) -> TarPrompt:
    """Semantic codes of prompts, one image a prompt.

    Repetition penalty, temperature, top-k and top-p are applied in this order. Equal prompts are read once.

    Args:
        model: language model and what its files say.
        prompts: B texts as typed; see :meth:`TarModel.prompt` for what becomes of them.
        settings: see :class:`TarPromptSettings`.
        noise: draws of B images; code i is drawn from stream "code", cell i.
        seed: only recorded in the report.

    Yields:
        :class:`CodeStep` after every code; returns :class:`TarPrompted`.

    Raises:
        UserError: no prompt, one that is refused, a scale the model does not have, or draws for another number of images.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError("text: it is no list of prompts; ask for at least one image.")
    if len(noise) != len(prompts):
        raise UserError(f"text: it asks for {len(prompts)} images, the draws are for {len(noise)}.")
    scale = DETAILS.index(settings.detail)
    asked = list(dict.fromkeys(prompts))
    texts = [model.prompt(text, scale) for text in asked]
    if not settings.repetition_penalty:
        settings = replace(settings, repetition_penalty=model.repetition_penalty)
    device = next(model.net.parameters()).device
    report = Report("tar-prompt", model.name, asdict(settings), seed, len(prompts), device.type)
    side, span = model.sides[scale], model.span
    total = side**2
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock, pause = Clock(device), PauseClock()
    with torch.inference_mode():
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts]).to(device)
        lengths = torch.tensor([len(text) for text in texts]).to(device)
        images = torch.tensor([asked.index(text) for text in prompts]).to(device)
        codes = torch.zeros(len(prompts), total, dtype=torch.int64, device=device)
        seen = torch.zeros(len(prompts), model.marks.codes, dtype=torch.bool, device=device)
        cells = torch.arange(total, device=device)
        with clock.phase("transformer"):
            # The last code is never fed.
            logits, cache = model.net.prefill(ids, lengths, total - 1, span, images)
    report.add(transformer_passes=1, transformer_tokens=ids.numel(), cache_bytes=cache.bytes)
    for k in range(total):
        with torch.inference_mode():  # never open across a yield: it would hold for whoever drives the loop
            if k:
                with clock.phase("transformer"):
                    logits = model.net.step(span[0] + codes[:, k - 1], k - 1, cache, span)
                report.add(transformer_passes=1, transformer_tokens=len(prompts))
            with clock.phase("sampling"):
                if settings.repetition_penalty != 1:
                    logits = penalised(logits, seen, settings.repetition_penalty)
                logits = allowed(logits / max(settings.temperature, 1e-5), settings.top_k, settings.top_p)
                new = (logits + noise.gumbel("code", cells[k : k + 1], logits.shape[-1])[:, 0]).argmax(-1, keepdim=True)
                codes[:, k : k + 1] = new
                seen.scatter_(1, new, True)
        pause.start()
        pause.stop((yield CodeStep(k + 1, total, codes.clone(), report)))
    clock.stop(report, pause.seconds)
    if device.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    shape = (len(prompts), side, side)
    report.maps["step"] = np.broadcast_to(np.arange(total, dtype=np.int32).reshape(1, side, side), shape).copy()
    report.maps["outcome"] = np.full(shape, PLAIN, np.uint8)
    # Copied to the host for whoever draws: the language model's device may be needed by then.
    return TarPrompted(
        codes.clone(), report, CodeCondition(tuple(codes.cpu().clone()), tuple(prompts), model.marks.codes)
    )
