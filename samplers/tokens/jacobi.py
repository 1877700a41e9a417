"""Exact parallel decoding: Jacobi iteration on a window of passes, with the draws of serial decoding.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023, arXiv
2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi
Decoding" (ICLR 2025, arXiv 2410.01699). There, a probabilistic test accepts tokens, and the images are other ones than those of
serial decoding. Here the random numbers belong to (seed, image, cell, value), so that a token is a function of its logits: the
fixed point of the iteration is the image of serial decoding itself, and no test is needed.

A call evaluates the W passes from the first one that is not certain, in every image:

1. the rows of the W passes are fed at once, with the tokens so far: certain ones and guesses. Every row attends to the slots
   that it attends to in its own serial pass. Keys and values replace those of the last call;
2. the cells of the W passes are drawn, from the same noise in every call;
3. the first pass is certain, because its input is. The following pass is certain if no token of the passes before it changed,
   and so on. A window moves behind its last certain pass, one pass at least, so that no image takes more calls than serially;
4. tokens that enter the window start as a copy of the newest one.

Images advance independently. The host reads their positions after each call: at once on a CPU, one call late on a GPU, so that
the device never waits; the price is at most one superfluous call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.gpt import Cache
from ...reports.record import ACCEPTED, PLAIN, Report
from ..driver import timed
from .draws import draw
from .loop import TokenRun, TokenSampled, TokenSampler, TokenStep, TokenSteps
from .loop import decode as decode_serially
from .schedule import RowTable, Schedule

# On a CPU, batches of this size and more gain little or nothing from a window.
_CPU_BATCH = 4


class Window(NamedTuple):
    """The rows and cells of one call, for L images.

    Attributes:
        rows: int64 [L, m], entries of the table's rows, padded with its last one.
        entries: int64 [L, n], entries of the table's cells, padded with its last one.
        cells: int64 [L, n], the cells; padding is the number of cells of the grid.
        predicted_by: int64 [L, n], index among ``rows`` of the row that predicts each cell; None: row i predicts cell i.
        first: lower bound of the first pass of all windows.
        end: image slots below this one are attended to.
    """

    rows: Tensor
    entries: Tensor
    cells: Tensor
    predicted_by: Tensor | None
    first: int
    end: int


class Predictor(Protocol):
    """The model of a windowed generation."""

    def draw(self, window: Window) -> Tensor:
        """Feed the rows of a window and draw its cells: int64 [L, n]."""
        ...

    def keep(self, index: Tensor, images: Sequence[int], tokens: Tensor) -> None:
        """Reduce the batch to its entries ``index`` int64 [L]: the images ``images``, whose tokens are ``tokens``."""
        ...


class DeviceTable:
    """A :class:`RowTable` as device tensors, behind ``prefix`` slots that every row attends to."""

    def __init__(self, table: RowTable, prefix: int, device: torch.device):
        def copy(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.fed, self.position, self.slot = copy(table.fed), copy(table.position), copy(table.slot + prefix)
        self.visible = copy(np.pad(table.visible, ((0, 0), (prefix, 0)), constant_values=True))
        self.row_start, self.cell_start = copy(table.row_start), copy(table.cell_start)
        self.cells, self.cell_row, self.cell_pass = copy(table.cells), copy(table.cell_row), copy(table.cell_pass)
        self.decided_at = copy(table.decided_at)


class _Positions:
    """Reads positions on the host: at once on a CPU, one call late on a GPU."""

    def __init__(self, start: Sequence[int], last: int, device: torch.device):
        self.late, self._last, self._known = device.type == "cuda", last, list(start)
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, at: Tensor) -> list[int]:
        """Lower bounds of the positions int64 [B]; on a CPU the positions."""
        if not self.late:
            return at.tolist()
        host = torch.empty(at.shape, dtype=at.dtype, pin_memory=True)
        host.copy_(at, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if self._pending is not None:
            self._pending[1].synchronize()
            self._known = self._pending[0].tolist()
        self._pending = host, event
        # Every call moves every image by a pass at least.
        return [min(n + 1, self._last) for n in self._known]


@dataclass(eq=False)
class Jacobi:
    """State of one iteration.

    Attributes:
        table, on: the schedule's rows and cells, on the host and on the device.
        size: the window W.
        predictor: the model.
        tokens: int64 [L, N + 1] of the live images: certain tokens and guesses. The last column receives padding.
        shrink: whether finished images leave the batch.
        at: int64 [L], the first pass of each live image that is not certain.
        images: indices of the live images.
        positions: lower bound of ``at`` for all B images; see :class:`_Positions`.
        history: ``at`` of all images after every call.
    """

    table: RowTable
    on: DeviceTable
    size: int
    predictor: Predictor
    tokens: Tensor
    shrink: bool = True
    history: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device, table, batch = self.tokens.device, self.table, len(self.tokens)
        passes = np.arange(table.passes + 1)
        stop = np.minimum(passes + self.size, table.passes)
        self._row_counts = table.row_start[stop] - table.row_start[passes]
        self._cell_counts = table.cell_start[stop] - table.cell_start[passes]
        self._ends = np.array([table.pass_end[k:s].max(initial=0) for k, s in zip(passes, stop, strict=True)])
        self._range = torch.arange(max(self._row_counts.max(), self._cell_counts.max()), device=device)
        self._all = self.tokens
        self._where: Tensor | None = None  # indices of the live images; None: all
        self.at = torch.ones(batch, dtype=torch.int64, device=device)
        self.images = list(range(batch))
        self.positions = [1] * batch
        self._reader = _Positions(self.positions, table.passes, device)
        self.history.append(self.at)
        first = int(table.cell_start[1])
        newest = int(table.cells[first - 1]) if first else table.known - 1
        self._guess(
            self.on.cell_start[self.at], self.tokens[:, newest : newest + 1].clone(), int(self._cell_counts.max())
        )

    @property
    def finished(self) -> bool:
        """Whether all images are known to be finished."""
        return min(self.positions) >= self.table.passes

    def _guess(self, entered: Tensor, token: Tensor, count: int) -> None:
        """Step 4: set ``count`` cells from entries int64 [L] on to a token int64 [L, 1]."""
        entries = (entered[:, None] + self._range[:count]).clamp(max=len(self.on.cells) - 1)
        self.tokens.scatter_(1, self.on.cells[entries], token.expand(-1, count))

    def call(self) -> None:
        """One call of the model."""
        on, size = self.on, self.size
        known = np.array([self.positions[i] for i in self.images])
        stop = (self.at + size).clamp(max=self.table.passes)
        # Step 1: the rows of the windows.
        row, row_stop = on.row_start[self.at], on.row_start[stop]
        rows = row[:, None] + self._range[: self._most(self._row_counts, known)]
        rows = torch.where(rows < row_stop[:, None], rows, len(on.fed) - 1)
        cell, cell_stop = on.cell_start[self.at], on.cell_start[stop]
        entries = cell[:, None] + self._range[: self._most(self._cell_counts, known)]
        inside = entries < cell_stop[:, None]
        entries = torch.where(inside, entries, len(on.cells) - 1)
        cells = on.cells[entries]
        predicted_by = None if self.table.one_to_one else (on.cell_row[entries] - row[:, None]).clamp_(min=0)
        end = int(self.table.slots if self._reader.late else self._ends[known].max())
        # Step 2: draw their cells.
        new = self.predictor.draw(Window(rows, entries, cells, predicted_by, int(known.min()), end))
        # Step 3: accept the passes up to the first changed token.
        unchanged = (new == self.tokens.gather(1, cells)) | ~inside
        self.tokens.scatter_(1, cells, new)
        leading = unchanged.cumprod(1).sum(1)
        self.at = on.cell_pass[torch.minimum(cell + leading, cell_stop - 1)] + 1
        # Step 4: guess the tokens that enter.
        newest = new.gather(1, (cell_stop - cell - 1).clamp(min=0)[:, None])
        self._guess(cell_stop, newest, int(self._cell_counts.max()))
        self._advance()

    def _most(self, counts: np.ndarray, known: np.ndarray) -> int:
        """The largest count of the windows at the passes ``known``, or behind them if these are lower bounds."""
        return int(counts[known.min() :].max() if self._reader.late else counts[known].max())

    def _advance(self) -> None:
        """Record the positions, and remove finished images from the batch."""
        before = self.history[-1]
        everywhere = self.at if self._where is None else before.index_copy(0, self._where, self.at)
        self.history.append(everywhere)
        self.positions = self._reader.read(everywhere)
        live = [i for i, image in enumerate(self.images) if self.positions[image] < self.table.passes]
        # On a GPU, rows of finished images cost less than a copy of the cache.
        if (
            not self.shrink
            or not live
            or len(live) > (len(self.images) // 2 if self._reader.late else len(self.images) - 1)
        ):
            return
        self._gather()
        self.images = [self.images[i] for i in live]
        index = torch.tensor(live, device=self.at.device)
        self._where = torch.tensor(self.images, device=self.at.device)
        self.at, self.tokens = self.at[index], self.tokens[index]
        self.predictor.keep(index, self.images, self.tokens)

    def _gather(self) -> None:
        if self._where is not None:
            self._all.index_copy_(0, self._where, self.tokens)

    def state(self) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, N] of all images, guesses included, and which are certain, bool [B, N]; copies."""
        self._gather()
        return self._all[:, :-1].clone(), self.on.decided_at < self.history[-1][:, None]

    def record(self, report: Report) -> dict[str, np.ndarray]:
        """Add the accepted and rejected guesses to a report; returns the maps "step" and "outcome" [B, N]."""
        table, history = self.table, torch.stack(self.history).cpu().numpy()
        window = self._cell_counts[history[:-1]].sum()
        step = np.stack([np.searchsorted(at, table.decided_at, side="right") for at in history.T])
        # The first pass of a window needs no guess.
        head = np.take_along_axis(history, np.maximum(step - 1, 0).T, axis=0).T
        accepted = (step > 0) & (table.decided_at > head)
        certain = (table.cell_start[-1] - table.cell_start[1]) * len(step)
        report.add(accepted=int(accepted.sum()), rejected=int(window - certain))
        return {"step": step.astype(np.int32), "outcome": np.where(accepted, ACCEPTED, PLAIN).astype(np.uint8)}


# ------------------------------------------------------------------------------------------------ token models


class TokenPredictor:
    """A token model whose prefix is in the cache.

    Args:
        run: the generation; its tokens are those of :class:`Jacobi`.
        table, on: the schedule's rows and cells.
        cache: of the prefix, and of the cells that the schedule takes as known.
        guided: for each pass whether guidance is applied.
    """

    def __init__(self, run: TokenRun, table: RowTable, on: DeviceTable, cache: Cache, guided: Sequence[bool]):
        self.run, self.on, self.cache, self._draws = run, on, cache, run.draws
        self._special = bool(run.model.net.config.special)
        self._last_guided = max((k for k, g in enumerate(guided) if g), default=-1)
        self._guided: bool | Tensor = all(guided[1:])
        if any(guided[1:]) and not self._guided:
            by_cell = [guided[k] if k < len(guided) else False for k in table.cell_pass.tolist()]
            self._guided = torch.tensor(by_cell, device=run.device)

    def draw(self, window: Window) -> Tensor:
        run, on, net = self.run, self.on, self.run.model.net
        null = window.first <= self._last_guided
        with run.clock.phase("transformer"):
            fed = on.fed[window.rows]
            x = net.embed(run.tokens.gather(1, fed.clamp(max=run.model.tokens)))
            if self._special:
                special = fed - run.model.tokens - 1
                x = torch.where(special[..., None] >= 0, net.special_rows()[special.clamp(min=0)], x)
            end = self.cache.prefix + window.end
            position, slot, visible = on.position[window.rows], on.slot[window.rows], on.visible[window.rows, :end]
            hidden = run.feed_rows(x, position, slot, self.cache, null, end, visible)
            if window.predicted_by is not None:
                rows = torch.cat([window.predicted_by] * 2) if null else window.predicted_by
                hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
            logits = net.logits(hidden)
        with run.clock.phase("sampling"):
            guided = self._guided[window.entries] if isinstance(self._guided, Tensor) else self._guided
            logits = run.guide(logits, guided if null else False)
            return draw(logits, run.settings, run.draws.gumbel("token", window.cells, logits.shape[-1]))

    def keep(self, index: Tensor, images: Sequence[int], tokens: Tensor) -> None:
        batch, halves = len(self.run.tokens), len(self.cache.keys[0]) // len(self.run.tokens)
        rows = torch.cat([index + half * batch for half in range(halves)])
        self.cache.keep(rows)
        if self.cache.bias is not None:
            self.cache.bias = self.cache.bias[rows]
        self.run = replace(self.run, tokens=tokens, draws=self._draws.of(images))


def decode(run: TokenRun, window: int) -> TokenSampler:
    """Decode a schedule with a window of passes; without one, or with one of a single pass, serially.

    Args:
        run: the generation.
        window: passes W evaluated in one call; 0 or 1: serial decoding.

    Yields:
        :class:`TokenStep` after the prefill and after each call. With a window, ``done`` counts the certain cells of the image
        that has the fewest, and ``total`` the cells; guesses count as undecided.

    Returns:
        :class:`TokenSampled`; with a window the report also counts the guesses that a call accepted and those that it drew but did
        not accept. Map "step" is the call that made a cell certain, "outcome" whether that needed a guess (ACCEPTED) or not.

    Raises:
        UserError: a schedule whose rows attend to slots that are not written yet.
    """
    if window <= 1:
        return (yield from decode_serially(run))
    check_window(run.schedule)
    if run.device.type == "cpu" and len(run.tokens) >= _CPU_BATCH:
        hint = f"parallel: a window feeds 4 times the rows; on a CPU with {_CPU_BATCH} images or more, compare with 0."
        run.report.note = "; ".join(filter(None, (run.report.note, hint)))
    return (yield from timed(_decode(run, window), run.clock, run.report, run.device))


def check_window(schedule: Schedule) -> None:
    """Refuse a schedule that a window cannot reproduce.

    Raises:
        UserError: rows attend to slots that are not written yet.
    """
    if schedule.unwritten_visible:
        raise UserError(
            "parallel: the blanks of mask_undecoded off cannot be decoded in a window; switch mask_undecoded on, or set parallel to 0."
        )


def start(run: TokenRun, schedule: Schedule, cache: Cache, guided: Sequence[bool], window: int, shrink: bool) -> Jacobi:
    """The iteration of a schedule whose first pass is done.

    Args:
        run: its tokens int64 [B, N] hold the cells of the first pass and the known ones.
        schedule: what to decode.
        cache: with at least ``schedule.table.slots`` image slots.
        guided: for each pass whether guidance is applied.
        window: passes of one call.
        shrink: whether finished images leave the batch and the cache.
    """
    table = schedule.table
    on = DeviceTable(table, cache.prefix, run.device)
    tokens = torch.cat([run.tokens, torch.zeros_like(run.tokens[:, :1])], dim=1)
    predictor = TokenPredictor(replace(run, tokens=tokens), table, on, cache, guided)
    return Jacobi(table, on, window, predictor, tokens, shrink)


def _decode(run: TokenRun, window: int) -> TokenSteps:
    report, clock = run.report, run.clock
    shape = (len(run.tokens), run.model.grid, run.model.grid)
    with torch.inference_mode():
        with clock.phase("transformer"):
            logits, cache = run.prefill(any(run.guided), run.schedule.table.slots)
        report.add(cache_bytes=cache.bytes)
        with clock.phase("sampling"):
            first = torch.tensor(run.schedule.passes[0].cells, device=run.device)
            logits = run.guide(logits[:, None].expand(-1, len(first), -1), run.guided[0])
            new = draw(logits, run.settings, run.draws.gumbel("token", first, logits.shape[-1]))
            run.tokens.index_copy_(1, first, new)
        state = start(run, run.schedule, cache, run.guided, window, shrink=True)
    while True:
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            codes, decided = state.state()
        done = int(state.table.cell_start[min(state.positions)])
        codes, decided = codes.clone().masked_fill_(~decided, 0).view(shape), decided.clone().view(shape)
        if state.finished:
            break
        yield TokenStep(done, run.model.tokens, codes, decided, report)
        with torch.inference_mode():
            state.call()
    yield TokenStep(run.model.tokens, run.model.tokens, codes, decided, report)
    report.maps.update({name: values.reshape(shape) for name, values in state.record(report).items()})
    return TokenSampled(codes.clone(), report)
