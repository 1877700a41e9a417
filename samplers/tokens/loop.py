"""The cached decoding loop of the samplers of discrete tokens.

A *schedule* lists the cells that each pass of the transformer decides and the rows fed to it. LlamaGen, ZipAR and PAR differ
in their schedules only. A schedule is known before the first pass: its index tensors are copied to the device once, and the
loop never waits for the device.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks import ops
from ...model_loaders.networks.gpt import Cache, TokenModel
from ...reports.record import PLAIN, Clock, Report
from ..conditioning import AnyCondition
from ..driver import start_clock, timed
from .conditioning import PreparedCondition, prepare
from .draws import Draws, ahead, draw
from .schedule import Schedule
from .settings import TokenSettings

S = TypeVar("S", bound=TokenSettings)


@dataclass(frozen=True, eq=False)
class TokenStep:
    """The partial result that a token sampler yields after every pass.

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
    """Result of a token sampler: codes int64 [B, G, G] and the report."""

    codes: Tensor
    report: Report


# A driver may send the seconds it spent since the last step (on a preview, for example); see ``driver.timed``.
TokenSampler = Generator[TokenStep, "float | None", TokenSampled]
# The steps of a sampler without time keeping.
TokenSteps = Generator[TokenStep, None, TokenSampled]


# ------------------------------------------------------------------------------------------------ the schedule on a device


class DevicePass(NamedTuple):
    """A :class:`Pass` as device tensors.

    Attributes:
        cells, fed, position: int64, see :class:`Pass`.
        slot: int64, counted from the first slot of the cache.
        special: number of transition tokens.
        rows: int64, index of the fed row of each cell; None: row i predicts cell i.
        mask: bool [rows, end]; None: every row attends to all slots below ``end``.
        end: slots below this one are attended to.
        last: whether the pass feeds one row, whose slot is the last of these.
    """

    cells: Tensor
    fed: Tensor
    position: Tensor
    slot: Tensor
    special: int
    rows: Tensor | None
    mask: Tensor | None
    end: int
    last: bool


def to_device(schedule: Schedule, prefix: int, device: torch.device) -> list[DevicePass]:
    """A schedule's passes on a device, behind ``prefix`` cache slots of the condition; one copy per field."""
    passes = schedule.passes

    def copy(parts: Iterable[tuple[int, ...]]) -> tuple[Tensor, ...]:
        parts = list(parts)
        flat = torch.tensor([n for part in parts for n in part], dtype=torch.int64).to(device)
        return flat.split([len(part) for part in parts])

    cells, rows = copy(p.cells for p in passes), copy(p.rows for p in passes)
    fed, position = copy(p.fed for p in passes), copy(p.position for p in passes)
    slot = copy(tuple(prefix + s for s in p.slot) for p in passes)
    visible = [np.zeros((0, 0), bool), *schedule.visible()]
    masks = [np.pad(v, ((0, 0), (prefix, 0)), constant_values=True) for v in visible]
    flat = torch.from_numpy(np.concatenate([m.ravel() for m in masks if not m.all()] or [masks[0].ravel()])).to(device)
    out, at = [], 0
    for k, p in enumerate(passes):
        mask = None
        if not masks[k].all():
            mask = flat[at : at + masks[k].size].view(masks[k].shape)
            at += masks[k].size
        chosen = None if p.rows == tuple(range(len(p.position))) else rows[k]
        end = masks[k].shape[1]
        last = mask is None and tuple(p.slot) == (end - prefix - 1,)
        out.append(DevicePass(cells[k], fed[k], position[k], slot[k], p.special, chosen, mask, end, last))
    return out


# ------------------------------------------------------------------------------------------------ the run


@dataclass(eq=False)
class TokenRun:
    """State of one generation, made by :func:`begin`.

    With guidance, a pass has R = 2 B batch rows: the condition's, then the null condition's. ``null`` arguments say whether
    the second half is run.

    Attributes:
        tokens: int64 [B, N] so far. Samplers with ragged passes add one column for padding.
        decided: bool [N], the same for all images.
        guided: for each pass of the schedule whether guidance is applied.
    """

    model: TokenModel
    condition: PreparedCondition
    settings: TokenSettings
    draws: Draws
    schedule: Schedule
    report: Report
    clock: Clock
    tokens: Tensor
    decided: Tensor
    guided: list[bool]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def prefix(self, null: bool) -> tuple[Tensor, Tensor | None]:
        """Prefix rows [R, n, C] and their lengths int64 [R], None if all rows are valid."""
        lengths = self.condition.lengths
        rows = self.model.net.prefix(self.condition.condition, lengths, guided=null)
        return rows, torch.cat([lengths, lengths]) if lengths is not None and null else lengths

    def prefill(self, null: bool, slots: int | None = None, serial: bool = False) -> tuple[Tensor, Cache]:
        """Logits [R, V] of cell 0, and the cache with ``slots`` image slots; None: those of the schedule.

        ``serial``: see ``GPT.prefill``.
        """
        rows, lengths = self.prefix(null)
        self.report.add(transformer_passes=1, transformer_tokens=rows.shape[0] * rows.shape[1])
        slots = self.schedule.slots if slots is None else slots
        return self.model.net.prefill(rows, self.model.grid, slots, lengths, serial)

    def feed(self, at: DevicePass, cache: Cache, null: bool, every: bool = False) -> Tensor:
        """Logits [R, m, V] of the cells of a pass after the first; with ``every``, of all fed rows."""
        net = self.model.net
        x = net.embed(self.tokens[:, at.fed])
        if at.special:
            x = torch.cat([x, net.special_rows().expand(len(x), -1, -1)], dim=1)
        if null:
            x = torch.cat([x, x])
        self.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return net.step(x, at.position, at.slot, cache, at.end, None if every else at.rows, at.mask, at.last)

    def feed_ragged(self, fed: Tensor, cache: Cache, null: bool, end: int) -> Tensor:
        """Hidden rows [R, m, C] of a pass in which every image feeds its own cells, with a causal mask.

        Args:
            fed: int64 [B, m]. Images with fewer cells are padded with the last cell N - 1, which no row attends to; the cache
                then needs a slot for it.
            cache: see :meth:`prefill`.
            null: whether the null condition is run too.
            end: cells below this one are attended to; if a single cell is fed, all of them.
        """

        # The absolute position table has no entry for the last cell.
        position, slot, end = fed.clamp(max=self.model.tokens - 2), fed + cache.prefix, cache.prefix + end
        mask = None
        if fed.numel() > 1:
            mask = torch.arange(end, device=fed.device) <= (position + cache.prefix)[..., None]
        return self.feed_rows(self.model.net.embed(self.tokens.gather(1, fed)), position, slot, cache, null, end, mask)

    def feed_rows(
        self, x: Tensor, position: Tensor, slot: Tensor, cache: Cache, null: bool, end: int, mask: Tensor | None
    ) -> Tensor:
        """Hidden rows [R, m, C] of a pass in which every image feeds its own rows.

        Args:
            x: rows [B, m, C].
            position: int64 [B, m].
            slot: int64 [B, m], counted with the prefix.
            cache, null: see :meth:`feed_ragged`.
            end: slots below this one are attended to.
            mask: bool [B, m, end]; None: every row attends to all of them.
        """

        def halves(x: Tensor) -> Tensor:
            return torch.cat([x, x]) if null else x

        x = halves(x)
        self.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        if len(position) == 1:
            mask = None if mask is None else mask[0]
            return self.model.net.advance(x, position[0], slot[0], cache, end, mask)
        mask = None if mask is None else halves(mask[:, None])
        return self.model.net.advance(x, halves(position), halves(slot), cache, end, mask)

    def guide(self, logits: Tensor, guided: bool | Tensor) -> Tensor:
        """Classifier-free guidance: logits [R, m, V] to [B, m, V]. ``guided``: for all tokens, or bool [m] or [B, m]."""
        cond, null = logits[: len(self.tokens)], logits[len(self.tokens) :]
        if guided is False or not len(null):
            return cond
        mixed = torch.add(null, cond - null, alpha=self.settings.cfg)
        return mixed if guided is True else torch.where(guided[..., None], mixed, cond)

    def decide(self, at: DevicePass, logits: Tensor, guided: bool) -> None:
        """Draw the tokens of a pass from its logits [R, m, V]."""
        logits = self.guide(logits, guided)
        new = draw(logits, self.settings, self.draws.gumbel("token", at.cells, logits.shape[-1]))
        self.tokens.index_copy_(1, at.cells, new)
        self.decided.index_fill_(0, at.cells, True)

    def codes(self) -> Tensor:
        """A copy of the tokens so far, int64 [B, G, G]."""
        return self.tokens.clone().view(-1, self.model.grid, self.model.grid)


# Published guidance and top-k by kind of condition: LlamaGen's for classes and text, Tar's for codes and features.
_PUBLISHED = {"class": (4.0, 2000), "text": (7.5, 1000), "features": (4.0, 0), "codes": (4.0, 0)}
# PAR's guidance by width and regions (XL-4x, XXL-4x, 3B-4x, 3B-16x); all values can be drawn.
_PUBLISHED_PAR = {(1280, 4): 1.5, (1536, 4): 1.435, (3200, 4): 1.345, (3200, 16): 1.5}


def published(model: TokenModel) -> dict[str, Any]:
    """Published sampling settings of a model: "cfg" and "top_k"."""
    c = model.net.config
    cfg, top_k = _PUBLISHED[c.condition]
    if (c.dim, c.regions) in _PUBLISHED_PAR:
        cfg, top_k = _PUBLISHED_PAR[c.dim, c.regions], 0
    return {"cfg": cfg, "top_k": top_k}


def resolve(settings: S, model: TokenModel) -> S:
    """The settings with the model's published values for ``cfg`` 0 and ``top_k`` -1."""
    own = published(model)
    return replace(
        settings, cfg=settings.cfg or own["cfg"], top_k=own["top_k"] if settings.top_k < 0 else settings.top_k
    )


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
    prepared = prepare(model, condition, device)
    settings = resolve(settings, model)
    if len(draws) != len(condition):
        raise UserError(f"condition: it asks for {len(condition)} images, the draws are for {len(draws)}.")
    report = Report(name, model.name, asdict(settings), seed, len(condition), device.type)
    report.note = _remarks(model)
    tokens = torch.zeros(len(condition), model.tokens, dtype=torch.int64, device=device)
    decided = torch.zeros(model.tokens, dtype=torch.bool, device=device)
    until = settings.cfg_interval
    guided = [settings.cfg > 1 and (until < 0 or p.clock <= until) for p in schedule.passes]
    model.net.begin()
    clock = start_clock(device)
    return TokenRun(model, prepared, settings, draws, schedule, report, clock, tokens, decided, guided)


def _remarks(model: TokenModel) -> str:
    return "; ".join(filter(None, (ops.remark(model.net), model.net.remark)))


def raster_only(name: str, model: TokenModel) -> None:
    """Refuse a PAR.

    Raises:
        UserError: the model was trained in PAR's order.
    """
    if model.regions > 1:
        raise UserError(
            f"model: {model.name} was trained in PAR's order, which {name} does not follow; use the PAR Sampler."
        )


# ------------------------------------------------------------------------------------------------ the loop


def decode(run: TokenRun) -> TokenSampler:
    """Decode a schedule: every pass feeds its rows and draws a token for each of its cells."""
    return (yield from timed(_decode(run), run.clock, run.report, run.device))


def _decode(run: TokenRun) -> TokenSteps:
    report, clock = run.report, run.clock
    shape = (len(run.tokens), run.model.grid, run.model.grid)
    # The null half runs up to the last guided pass.
    last_guided = max((k for k, guided in enumerate(run.guided) if guided), default=-1)
    with torch.inference_mode(), clock.phase("transformer"):
        logits, cache = run.prefill(last_guided >= 0, serial=all(len(p.slot) <= 1 for p in run.schedule.passes))
        passes = to_device(run.schedule, cache.prefix, run.device)
        run.draws = ahead(run.draws, [at.cells for at in passes])
        logits = logits[:, None].expand(-1, len(passes[0].cells), -1)
    report.add(cache_bytes=cache.bytes)
    for k, at in enumerate(passes):
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            if k:
                with clock.phase("transformer"):
                    logits = run.feed(at, cache, k <= last_guided)
            with clock.phase("sampling"):
                run.decide(at, logits, run.guided[k])
        decided = run.decided.clone().view(1, *shape[1:]).expand(shape)
        yield TokenStep(k + 1, len(passes), run.codes(), decided, report)
    report.maps["step"] = np.repeat(run.schedule.fixed_at[None], len(run.tokens), axis=0)
    report.maps["outcome"] = np.full(shape, PLAIN, np.uint8)
    if run.model.net.graphs is not None:  # only now it is known what was captured
        report.note = _remarks(run.model)
    return TokenSampled(run.codes(), report)
