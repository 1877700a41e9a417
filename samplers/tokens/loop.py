"""The one cached decoding loop that every sampler of discrete tokens runs in.

A *schedule* says which cells of the grid each pass of the transformer decides, and what is fed to it for that. LlamaGen,
ZipAR and PAR differ in nothing else, and a schedule is known before the first pass: everything it needs on the device is
laid out once, and the loop never waits for a number to come back.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.gpt import Cache, TokenModel
from ...reports.record import PLAIN, Clock, Report
from ..conditioning import AnyCondition
from ..driver import PauseClock
from .conditioning import Given, given
from .draws import Draws, draw
from .schedule import Schedule
from .settings import TokenSettings


@dataclass(frozen=True, eq=False)
class TokenStep:
    """What a token sampler yields after every pass.

    Attributes:
        done, total: passes of the transformer.
        codes: int64 [B, G, G] so far; 0 where undecided.
        decided: bool [B, G, G].
        report: the running report (its counts so far).
    """

    done: int
    total: int
    codes: Tensor
    decided: Tensor
    report: Report


class TokenSampled(NamedTuple):
    """A token sampler's result: codes int64 [B, G, G] and the report."""

    codes: Tensor
    report: Report


# A driver may send the seconds it spent since the last step (drawing a preview, say); they are not the sampler's.
TokenSampler = Generator[TokenStep, "float | None", TokenSampled]


# ------------------------------------------------------------------------------------------------ the loop


class Laid(NamedTuple):
    """A :class:`Pass` on the device; slots count from the cache's first.

    ``rows`` None: every fed row predicts a cell, in order. ``mask`` None: every row sees all slots below ``end``.
    """

    cells: Tensor
    fed: Tensor
    place: Tensor
    slot: Tensor
    special: int
    rows: Tensor | None
    mask: Tensor | None
    end: int


def lay_out(schedule: Schedule, prefix: int, device: torch.device) -> list[Laid]:
    """A schedule's passes on a device, behind ``prefix`` cache slots of the condition; in one copy a kind."""
    passes = schedule.passes
    seen = [np.zeros((0, 0), bool), *schedule.visible()]

    def put(parts: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
        flat = torch.tensor([n for part in parts for n in part], dtype=torch.int64).to(device)
        return flat.split([len(part) for part in parts])

    cells, by, fed, place = (put([getattr(p, name) for p in passes]) for name in ("cells", "by", "fed", "place"))
    slot = put([tuple(prefix + s for s in p.slot) for p in passes])
    masks = [np.pad(v, ((0, 0), (prefix, 0)), constant_values=True) for v in seen]
    flat = torch.from_numpy(np.concatenate([m.ravel() for m in masks if not m.all()] or [masks[0].ravel()])).to(device)
    out, at = [], 0
    for k, p in enumerate(passes):
        mask = None
        if not masks[k].all():
            mask = flat[at : at + masks[k].size].view(masks[k].shape)
            at += masks[k].size
        rows = None if p.by == tuple(range(len(p.place))) else by[k]
        out.append(Laid(cells[k], fed[k], place[k], slot[k], p.special, rows, mask, masks[k].shape[1]))
    return out


@dataclass(eq=False)
class TokenRun:
    """State of one generation: made by :func:`begin`, gone afterwards.

    Attributes:
        tokens: int64 [B, N] so far. Where images go their own ways there is one more column, for whatever fills up.
        decided: bool [N], the same for all images.
        guided: whether each pass is guided.
    """

    model: TokenModel
    given: Given
    settings: TokenSettings
    draws: Draws
    schedule: Schedule
    report: Report
    clock: Clock
    tokens: Tensor
    decided: Tensor
    guided: list[bool]

    def prefix(self, both: bool) -> tuple[Tensor, Tensor | None]:
        """Rows [R, n, C] of the condition and their lengths; with ``both``, "no condition" in a second half."""
        lengths = self.given.lengths
        rows = self.model.net.prefix(self.given.condition, lengths, guided=both)
        return rows, torch.cat([lengths, lengths]) if lengths is not None and both else lengths

    def prefill(self, both: bool, slots: int | None = None) -> tuple[Tensor, Cache]:
        """Logits [R, V] behind the condition, and the cache, with picture slots for the schedule or as many as told."""
        rows, lengths = self.prefix(both)
        self.report.add(transformer_passes=1, transformer_tokens=rows.shape[0] * rows.shape[1])
        return self.model.net.prefill(rows, self.model.grid, self.schedule.slots if slots is None else slots, lengths)

    def feed(self, at: Laid, cache: Cache, both: bool, every: bool = False) -> Tensor:
        """Logits [R, m, V] of a pass after the first; with ``every``, of all rows fed."""
        net = self.model.net
        x = net.embed(self.tokens[:, at.fed])
        if at.special:
            x = torch.cat([x, net.special_rows().expand(len(x), -1, -1)], dim=1)
        if both:
            x = torch.cat([x, x])
        self.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return net.step(x, at.place, at.slot, cache, at.end, None if every else at.rows, at.mask)

    def feed_each(self, fed: Tensor, cache: Cache, both: bool, end: int) -> Tensor:
        """Hidden rows [R, m, C] of a pass in which every image feeds cells of its own, each seeing the cells up to itself.

        Args:
            fed: int64 [B, m]. The picture's last cell, which no other ever looks at, fills up where an image has less to feed;
                the cache then needs a slot for it.
            cache: see :meth:`prefill`.
            both: whether "no condition" is run too.
            end: cells below this one are looked at; of a single one fed, all of them.
        """

        def halves(x: Tensor) -> Tensor:
            return torch.cat([x, x]) if both else x

        x = halves(self.model.net.embed(self.tokens.gather(1, fed)))
        self.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        # Absolute positions have none for the last cell.
        place, slot, end = fed.clamp(max=self.model.tokens - 2), fed + cache.prefix, cache.prefix + end
        mask = None
        if fed.numel() > 1:
            mask = torch.arange(end, device=x.device) <= (place + cache.prefix)[:, None, :, None]
        if len(fed) == 1:
            return self.model.net.advance(x, place[0], slot[0], cache, end, None if mask is None else mask[0, 0])
        return self.model.net.advance(
            x, halves(place), halves(slot), cache, end, None if mask is None else halves(mask)
        )

    def take(self, at: Laid, logits: Tensor, guided: bool) -> None:
        """Draw a pass's tokens from its logits [R, m, V]."""
        logits = self.mix(logits, guided)
        new = draw(logits, self.settings, self.draws.gumbel("token", at.cells, logits.shape[-1]))
        self.tokens.index_copy_(1, at.cells, new)
        self.decided.index_fill_(0, at.cells, True)

    def mix(self, logits: Tensor, guided: bool | Tensor) -> Tensor:
        """Logits [B, m, V] after guidance, of [R, m, V]; ``guided``: whether, or bool [m] or [B, m], whether at that token."""
        cond, null = logits[: len(self.tokens)], logits[len(self.tokens) :]
        if guided is False or not len(null):
            return cond
        mixed = null + self.settings.cfg * (cond - null)
        return mixed if guided is True else torch.where(guided[..., None], mixed, cond)

    def codes(self) -> Tensor:
        """int64 [B, G, G] so far; a copy."""
        return self.tokens.clone().view(-1, self.model.grid, self.model.grid)


def begin(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: TokenSettings,
    draws: Draws,
    seed: int | None,
    schedule: Schedule,
) -> TokenRun:
    """Check the inputs and set up a generation.

    Raises:
        UserError: a condition that does not fit the model, or draws for another number of images.
    """
    device = next(model.net.parameters()).device
    what = given(model, condition, device)
    if len(draws) != len(condition):
        raise UserError(f"condition: it asks for {len(condition)} images, the draws are for {len(draws)}.")
    report = Report(name, model.name, asdict(settings), seed, len(condition), device.type)
    tokens = torch.zeros(len(condition), model.tokens, dtype=torch.int64, device=device)
    decided = torch.zeros(model.tokens, dtype=torch.bool, device=device)
    until = settings.cfg_interval
    guided = [settings.cfg > 1 and (until < 0 or p.clock <= until) for p in schedule.passes]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return TokenRun(model, what, settings, draws, schedule, report, Clock(device), tokens, decided, guided)


def raster_only(name: str, model: TokenModel) -> None:
    """Refuse a PAR.

    Raises:
        UserError: the model was trained in PAR's order.
    """
    if model.regions > 1:
        raise UserError(
            f"model: {model.name} was trained in PAR's order, which {name} does not follow; use the PAR Sampler."
        )


def decode(run: TokenRun) -> TokenSampler:
    """The loop: every pass feeds its rows, and draws a token for each of its cells."""
    report, clock, device = run.report, run.clock, run.tokens.device
    shape = (len(run.tokens), run.model.grid, run.model.grid)
    # The null half is needed up to the last guided pass, and dropped after it.
    last_guided = max((k for k, on in enumerate(run.guided) if on), default=-1)
    pause = PauseClock()
    with torch.inference_mode(), clock.phase("transformer"):
        logits, cache = run.prefill(last_guided >= 0)
        laid = lay_out(run.schedule, cache.prefix, device)
        logits = logits[:, None].expand(-1, len(laid[0].cells), -1)
    report.add(cache_bytes=cache.bytes)
    for k, at in enumerate(laid):
        with torch.inference_mode():  # never open across a yield: it would hold for whoever drives the loop
            if k:
                with clock.phase("transformer"):
                    logits = run.feed(at, cache, k <= last_guided)
            with clock.phase("sampling"):
                run.take(at, logits, run.guided[k])
        pause.start()
        pause.stop(
            (
                yield TokenStep(
                    k + 1, len(laid), run.codes(), run.decided.clone().view(1, *shape[1:]).expand(shape), report
                )
            )
        )
    clock.stop(report, pause.seconds)
    if device.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    report.maps["step"] = np.repeat(run.schedule.fixed_at[None], len(run.tokens), axis=0)
    report.maps["outcome"] = np.full(shape, PLAIN, np.uint8)
    return TokenSampled(run.codes(), report)
