"""Tar: a language model generates the semantic codes of an image, which condition a de-tokenizer.

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned Representations"
(arXiv 2506.18898). Logits are computed for the ids of image codes only, so that exactly the requested number of codes is
generated; the published program parses them from the text, and truncates or pads. This stage has no guidance.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks import ops
from ...model_loaders.networks.qwen import PromptCache, TarModel
from ...reports.record import PLAIN, Clock, Report
from ..conditioning import CodeCondition
from ..driver import finish, start_clock, timed
from .draws import Draws, allowed
from .jacobi import DeviceTable, Jacobi, Window
from .llamagen import raster
from .settings import DETAILS, TarPromptSettings


@dataclass(frozen=True, eq=False)
class CodeStep:
    """The partial result that the sampler yields after every code.

    Attributes:
        done, total: codes of every image; with a window those of the image that has the fewest.
        codes: int64 [B, n] so far; 0 where undecided.
        report: the running report (its counts so far).
    """

    done: int
    total: int
    codes: Tensor
    report: Report


class TarPrompted(NamedTuple):
    """Result of the sampler: codes int64 [B, n], the report, and the codes as the condition of a de-tokenizer."""

    codes: Tensor
    report: Report
    condition: CodeCondition


# A driver may send the seconds it spent since the last step; see ``driver.timed``.
TarPrompt = Generator[CodeStep, "float | None", TarPrompted]
# Public name of ``driver.finish`` for this sampler.
finish_prompt = finish


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, CTRL, as in Hugging Face transformers).

    Args:
        logits: fp32 [..., V].
        used: bool [..., V], values that were drawn before. Their logits are divided by the penalty if positive, else
            multiplied by it.
        penalty: 1 changes nothing.
    """
    return torch.where(used, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


@dataclass(eq=False)
class _PromptRun:
    """State of one generation.

    Attributes:
        prompts: one per image.
        ids: int64 [P, n], token ids of the distinct prompts, right-padded.
        lengths: int64 [P].
        images: int64 [B], index of every image's prompt.
        side: side of the grid of codes.
    """

    model: TarModel
    prompts: tuple[str, ...]
    settings: TarPromptSettings
    noise: Draws
    report: Report
    clock: Clock
    ids: Tensor
    lengths: Tensor
    images: Tensor
    side: int


def tar_prompt(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, noise: Draws, seed: int | None = None
) -> TarPrompt:
    """Generate the semantic codes of prompts, one image per prompt.

    Repetition penalty, temperature, top-k and top-p are applied in this order. Equal prompts are run once.

    Args:
        model: the language model with its metadata.
        prompts: B texts as typed; see :meth:`TarModel.prompt` for the template.
        settings: see :class:`TarPromptSettings`.
        noise: draws of B images; code i is drawn from stream "code", cell i.
        seed: only recorded in the report.

    Yields:
        :class:`CodeStep` after every code; returns :class:`TarPrompted`.

    Raises:
        UserError: no prompt, an invalid one, a scale that the model does not have, or draws for another number of images.
    """
    run = _begin(model, prompts, settings, noise, seed)
    return (yield from timed(_generate(run), run.clock, run.report, run.ids.device))


def _begin(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, noise: Draws, seed: int | None
) -> _PromptRun:
    """Check the inputs and encode the prompts."""
    if isinstance(prompts, str) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError("text: it is no list of prompts; ask for at least one image.")
    if len(noise) != len(prompts):
        raise UserError(f"text: it asks for {len(prompts)} images, the draws are for {len(noise)}.")
    scale = DETAILS.index(settings.detail)
    distinct = list(dict.fromkeys(prompts))
    texts = [model.prompt(text, scale) for text in distinct]
    if not settings.repetition_penalty:
        settings = replace(settings, repetition_penalty=model.repetition_penalty)
    device = model.net.compute_device
    report = Report("tar-prompt", model.name, asdict(settings), seed, len(prompts), device.type)
    report.note = ops.remark(model.net)
    clock = start_clock(device)
    longest = max(map(len, texts))
    with torch.inference_mode():
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts]).to(device)
        lengths = torch.tensor([len(text) for text in texts]).to(device)
        images = torch.tensor([distinct.index(text) for text in prompts]).to(device)
    return _PromptRun(model, tuple(prompts), settings, noise, report, clock, ids, lengths, images, model.sides[scale])


def _draw(settings: TarPromptSettings, logits: Tensor, used: Tensor, gumbel: Tensor) -> Tensor:
    """Codes int64 [...] from logits fp32 [..., V], the values used before, bool [..., V], and Gumbel noise."""
    if settings.repetition_penalty != 1:
        logits = penalised(logits, used, settings.repetition_penalty)
    logits = allowed(logits / max(settings.temperature, 1e-5), settings.top_k, settings.top_p)
    return (logits + gumbel).argmax(-1)


def _generate(run: _PromptRun) -> Generator[CodeStep, None, TarPrompted]:
    model, settings, report, clock, device = run.model, run.settings, run.report, run.clock, run.ids.device
    batch, total, span = len(run.prompts), run.side**2, model.span
    window = settings.parallel if total > 1 else 0
    table = raster(run.side).table
    with torch.inference_mode():
        # The last code is not fed; a window needs a slot for padding.
        slots = table.slots if window > 1 else total - 1
        codes = torch.zeros(batch, total, dtype=torch.int64, device=device)
        used = torch.zeros(batch, model.marks.codes, dtype=torch.bool, device=device)
        cells = torch.arange(total, device=device)
        with clock.phase("transformer"):
            logits, cache = model.net.prefill(run.ids, run.lengths, slots, span, run.images)
    report.add(transformer_passes=1, transformer_tokens=run.ids.numel(), cache_bytes=cache.bytes)
    for k in range(1 if window > 1 else total):
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            if k:
                with clock.phase("transformer"):
                    logits = model.net.step(span[0] + codes[:, k - 1], k - 1, cache, span)
                report.add(transformer_passes=1, transformer_tokens=batch)
            with clock.phase("sampling"):
                gumbel = run.noise.gumbel("code", cells[k : k + 1], logits.shape[-1])[:, 0]
                new = _draw(settings, logits, used, gumbel)[:, None]
                codes[:, k : k + 1] = new
                used.scatter_(1, new, True)
        yield CodeStep(k + 1, total, codes.clone(), report)
    shape = (batch, run.side, run.side)
    if window > 1:
        with torch.inference_mode():
            on = DeviceTable(table, cache.prompt, device)
            tokens = torch.cat([codes, torch.zeros_like(codes[:, :1])], dim=1)
            state = Jacobi(table, on, window, _CodePredictor(run, on, cache, tokens), tokens)
        while not state.finished:
            with torch.inference_mode():
                state.call()
                codes, decided = state.state()
            yield CodeStep(min(state.positions), total, codes.clone().masked_fill_(~decided, 0), report)
        report.maps.update({name: values.reshape(shape) for name, values in state.record(report).items()})
    else:
        report.maps["step"] = np.broadcast_to(np.arange(total, dtype=np.int32).reshape(1, *shape[1:]), shape).copy()
        report.maps["outcome"] = np.full(shape, PLAIN, np.uint8)
    # The condition is on the host: the language model's device may be needed for the de-tokenizer.
    condition = CodeCondition(tuple(codes.cpu().clone()), run.prompts, model.marks.codes)
    return TarPrompted(codes.clone(), report, condition)


class _CodePredictor:
    """The language model in a window; see :class:`samplers.tokens.jacobi.Predictor`."""

    def __init__(self, run: _PromptRun, on: DeviceTable, cache: PromptCache, tokens: Tensor):
        self.run, self.on, self.cache, self.tokens, self.noise = run, on, cache, tokens, run.noise

    def draw(self, window: Window) -> Tensor:
        run, on, span = self.run, self.on, self.run.model.span
        with run.clock.phase("transformer"):
            fed = on.fed[window.rows]
            visible = on.visible[window.rows, : self.cache.prompt + window.end]
            ids = span[0] + self.tokens.gather(1, fed)
            logits = run.model.net.advance(
                ids, on.position[window.rows], on.slot[window.rows], visible, self.cache, span
            )
        run.report.add(transformer_passes=1, transformer_tokens=fed.numel())
        with run.clock.phase("sampling"):
            # The penalty of a code depends on the codes before it, guesses among them.
            codes, values = self.tokens[:, None, :-1], logits.shape[-1]
            before = torch.arange(codes.shape[2], device=codes.device) < window.cells[..., None]
            counts = torch.zeros(logits.shape, dtype=torch.int32, device=codes.device)
            counts.scatter_add_(2, codes.expand_as(before), before.to(counts.dtype))
            gumbel = self.noise.gumbel("code", window.cells, values)
            return _draw(run.settings, logits, counts > 0, gumbel)

    def keep(self, index: Tensor, images: Sequence[int], tokens: Tensor) -> None:
        self.cache.keep(index)
        self.cache.lengths, self.tokens, self.noise = self.cache.lengths[index], tokens, self.run.noise.of(images)
        if self.cache.padding_mask is not None:
            self.cache.padding_mask = self.cache.padding_mask[index]
