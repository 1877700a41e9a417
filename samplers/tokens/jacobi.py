"""Exact parallel decoding: Jacobi iteration on a window of passes, with the draws of serial decoding.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023,
arXiv 2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (ICLR 2025, arXiv 2410.01699). There, a probabilistic test accepts tokens, and the images
are other ones than those of serial decoding. Here the random numbers belong to (seed, image, cell, value), so that a
token is a function of its logits: the fixed point of the iteration is the image of serial decoding itself, and no test
is needed.

In 16 bits a token is the same function of its input only if its pass has the same shape, because the shape decides
the order of the sums. Every call is then padded to one shape (``one_shape`` in ``networks/llama.py``), so that windows
of all widths from 1 to the side of the image draw the same image. Wider ones and serial decoding have other shapes, and
draw other images of the same distribution. ``docs/weights.md`` counts equal images.

A call evaluates the W passes from the first one that is not certain, in every image. Images advance independently. The
host reads their positions after each call, and waits for the device there only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.llama import Cache, is_16_bit
from ...reports.record import ACCEPTED, PLAIN, dtype_of
from ..driver import to_device
from .loop import TokenRun, TokenSampled, TokenSampler, decide, feed_tokens, guided_logits, prefill, sample
from .schedule import DeviceTable, Schedule, attention_mask

# On a CPU, batches of this size and more gain little or nothing from a window.
_CPU_BATCH = 4
# The rows of an image in a call of 16-bit weights are a multiple of this.
ROWS = 32


@dataclass(eq=False)
class Active:
    """The L images of a batch whose last pass is not certain yet."""

    run: TokenRun  # of these images only, with their certain tokens and guesses
    image_ids: np.ndarray  # int64 [L], places in the batch
    # int64 [L], the first pass of each image that is not certain: on the host, and the same on the device
    first_uncertain: np.ndarray
    first_on_device: Tensor


@dataclass(frozen=True, eq=False)
class Window:
    """The passes that a call evaluates, and the cells that these decide; on the device, in the order of the
    schedule.
    """

    first: Tensor  # int64 [L], first pass of each image
    stop: Tensor  # int64 [L], the pass behind the last one
    rows: Tensor  # int64 [L, m], rows that are fed; padded
    entries: Tensor  # int64 [L, n], indices of the cells in the schedule; padded
    inside: Tensor  # bool [L, n], False on the padding of ``entries``
    end: int  # image slots below this one are attended to


def iterate(run: TokenRun, schedule: Schedule, window: int, cache: Cache, shrink: bool = True) -> Iterator[np.ndarray]:
    """The passes after the first one by Jacobi iteration with a window of W; yields the first uncertain pass of every
    image, int64 [B].

    Args:
        run: its tokens hold the cells of the first pass and the known ones, and receive certain tokens and guesses.
        schedule: the passes.
        window: W, number of passes that a call evaluates.
        cache: with at least ``schedule.ahead.slots`` image slots.
        shrink: whether finished images leave the batch and the cache.
    """
    passes = len(schedule.passes)
    guided = run.guided(schedule)
    last_guided = max((k for k, g in enumerate(guided) if g), default=-1)

    with torch.inference_mode():
        table = DeviceTable(schedule.ahead, cache.prefix, run.device)
        guided_cells = to_device(np.array([*guided, False])[schedule.ahead.cell_pass], run.device)
        active = _first_window(run, schedule, table, window)

    all_first_uncertain = active.first_uncertain
    while all_first_uncertain.min() < passes:
        with torch.inference_mode():
            w = next_window(table, active, window)
            cells = table.cells[w.entries]

            # 1. Feed the rows of the W passes at once, with the tokens so far: certain ones and guesses. Every row
            #    attends to the slots that it attends to in its own serial pass. Keys and values replace those of the
            #    last call.
            first = 0 if run.rows else int(active.first_uncertain.min())  # of one shape: always with the null rows
            null = first <= last_guided
            with run.clock.phase(run.phases[0]):
                hidden = _feed(active.run, cache, table, w, null)

            # 2. Draw the cells of the W passes, from the same noise in every call.
            with run.clock.phase(run.phases[1]):
                logits = guided_logits(active.run, hidden, null and (all(guided) or guided_cells[w.entries]))
                new = sample(active.run, logits, cells)

            # 3. Count the agreeing prefix. The first pass is certain, because its input is. The following pass is
            #    certain if no token of the passes before it changed, and so on.
            unchanged = (new == active.run.tokens.gather(1, cells)) | ~w.inside
            agreeing = unchanged.cumprod(1).sum(1)
            active.run.tokens.scatter_(1, cells, new)

            # 4. Slide every image's window to the pass of its first cell that is not certain, by one pass at least: no
            #    image takes more calls than serially. Tokens that enter the window start as a copy of the newest one.
            _slide(table, active, w, window, new, agreeing)
            active.first_uncertain = active.first_on_device.cpu().numpy()  # the host waits here
            all_first_uncertain = all_first_uncertain.copy()
            all_first_uncertain[active.image_ids] = active.first_uncertain
            _commit(run, table, active, all_first_uncertain)

            # 5. Drop finished images.
            left = np.flatnonzero(active.first_uncertain < passes)
            if shrink and not run.rows and 0 < len(left) < len(active.image_ids):
                active = _keep(active, cache, left)
        yield all_first_uncertain


def _first_window(run: TokenRun, schedule: Schedule, table: DeviceTable, window: int) -> Active:
    """All images at the pass after the first one; the tokens of their windows start as a copy of the newest one."""
    images = np.arange(len(run.tokens))
    first_uncertain = np.ones_like(images)
    active = Active(run, images, first_uncertain, to_device(first_uncertain, run.device))

    decided = schedule.passes[0].cells or range(schedule.known)
    newest = run.tokens[:, decided[-1], None].clone()
    _guess(run.tokens, _entering(table, active.first_on_device, window), newest)
    return active


def _slide(table: DeviceTable, active: Active, w: Window, window: int, new: Tensor, agreeing: Tensor) -> None:
    """Slide windows whose first ``agreeing`` cells int64 [L] are certain, of ``new`` tokens int64 [L, n]."""
    first_cell = table.cell_start[w.first]
    last_cell = table.cell_start[w.stop] - 1
    active.first_on_device = table.cell_pass[torch.minimum(first_cell + agreeing, last_cell)] + 1

    newest = new.gather(1, (last_cell - first_cell).clamp(min=0)[:, None])
    _guess(active.run.tokens, _entering(table, w.stop, window), newest)


def next_window(table: DeviceTable, active: Active, window: int) -> Window:
    """The W passes of every active image from its first uncertain one on, or as many as are left."""
    t = table.host
    first = active.first_uncertain
    stop = np.minimum(first + window, t.passes)
    most_rows = int((t.row_start[stop] - t.row_start[first]).max())
    most_cells = int((t.cell_start[stop] - t.cell_start[first]).max())
    end = 0
    for a, b in zip(first, stop, strict=True):
        end = max(end, int(t.end[a:b].max(initial=0)))

    first_on_device = active.first_on_device
    stop_on_device = (first_on_device + window).clamp(max=t.passes)
    rows, _ = padded_ranges(table.row_start, first_on_device, stop_on_device, most_rows, len(t.fed) - 1)
    entries, inside = padded_ranges(table.cell_start, first_on_device, stop_on_device, most_cells, len(t.cells) - 1)
    return Window(first_on_device, stop_on_device, rows, entries, inside, end)


def padded_ranges(starts: Tensor, first: Tensor, stop: Tensor, count: int, padding: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows or cells of the passes ``first`` to ``stop`` - 1 of every image.

    Args:
        starts: int64 [P + 1], first row or cell of each pass.
        first, stop: int64 [L].
        count: the most that an image has, n.
        padding: index in place of those that an image has not.

    Returns int64 [L, n], and bool [L, n], False on padding.
    """
    begin = starts[first][:, None]
    end = starts[stop][:, None]
    index = begin + torch.arange(count, device=starts.device)
    inside = index < end
    return torch.where(inside, index, padding), inside


def _feed(run: TokenRun, cache: Cache, table: DeviceTable, w: Window, null: bool) -> Tensor:
    """Hidden rows [R, n, C] that predict the cells of a window."""
    fed = table.fed[w.rows]
    position = table.position[w.rows]
    slot = table.slot[w.rows]
    end = cache.prefix + w.end
    mask = attention_mask(table, w.rows, end)
    if len(w.rows) == 1:  # slots that the batch rows share are written faster
        fed = fed[0]
        position = position[0]
        slot = slot[0]
        mask = mask[0]
    hidden = feed_tokens(run, cache, fed, position, slot, null, end, mask)

    first_row = table.row_start[w.first][:, None]
    predicted_by = (table.cell_row[w.entries] - first_row).clamp(min=0)
    return chosen_rows(hidden, predicted_by)


def chosen_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` int64 [B, n] of hidden rows [R, m, C], the same for the condition and the null condition:
    [R, n, C].
    """
    index = index.repeat(len(hidden) // len(index), 1)[..., None]
    return hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))


def _entering(table: DeviceTable, stop: Tensor, window: int) -> Tensor:
    """Cells int64 [L, n] of the W passes behind a window that ends before pass ``stop`` int64 [L], of which the next
    window may have some. Padded.
    """
    t = table.host
    ends = np.minimum(np.arange(t.passes) + window, t.passes)
    most = int((t.cell_start[ends] - t.cell_start[:-1]).max())
    entries, _ = padded_ranges(table.cell_start, stop, (stop + window).clamp(max=t.passes), most, len(t.cells) - 1)
    return table.cells[entries]


def _guess(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set cells int64 [L, n] to a token int64 [L, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))


def _commit(run: TokenRun, table: DeviceTable, active: Active, all_first_uncertain: np.ndarray) -> None:
    """Copy the tokens of the active images into the run of the whole batch; cells of certain passes are decided."""
    first_uncertain = active.first_on_device
    if active.run is not run:
        index = to_device(active.image_ids, run.device)
        run.tokens.index_copy_(0, index, active.run.tokens)
        first_uncertain = to_device(all_first_uncertain, run.device)
    run.decided = table.decided_at < first_uncertain[:, None]


def _keep(active: Active, cache: Cache, left: np.ndarray) -> Active:
    """The active images at the places ``left`` int64, alone in the cache too, which holds one or both branches of
    guidance.
    """
    images = len(active.image_ids)
    branches = len(cache.blocks[0]) // images
    index = to_device(left, active.first_on_device.device)
    cache.keep(torch.cat([index + branch * images for branch in range(branches)]))
    return Active(
        run=active.run.of(left),
        image_ids=active.image_ids[left],
        first_uncertain=active.first_uncertain[left],
        first_on_device=active.first_on_device[index],
    )


def windows(run: TokenRun, schedule: Schedule, window: int) -> TokenSampler:
    """Decode a schedule in windows; yields steps after the prefill and after each call.

    ``done`` of a step counts the certain cells of the image that has the fewest, and ``total`` the cells; guesses count
    as undecided. The report also counts the guesses that a call accepted and those that it drew but did not accept. Map
    "step" is the call that made a cell certain, "outcome" whether that needed a guess (ACCEPTED) or not.

    Raises:
        UserError: logits that were not finite.
    """
    if run.device.type == "cpu" and len(run.tokens) >= _CPU_BATCH:
        hint = (
            f"parallel: it computes about 4 times as many rows; on a CPU with {_CPU_BATCH} or more images, compare the "
            "time with 0."
        )
        run.report.remark(hint)

    t = schedule.ahead
    if is_16_bit(run.net):
        run.rows = padded_rows(schedule, window)
        side = schedule.grid
        hint = f"every value from 1 to {side} draws this image, 0 rounds differently"
        if run.rows > padded_rows(schedule, side):
            hint = f"{window} rounds differently from 0, and from 1 to {side}, which draw one image"
        run.report.remark(f"parallel in {dtype_of(run.net)}: {hint}; in fp32 all draw one image.")

    # 1. Prefill, which predicts the cells of the first pass.
    guided = run.guided(schedule)
    with torch.inference_mode():
        first = to_device(np.array(schedule.passes[0].cells, np.int64), run.device)
        with run.clock.phase("transformer"):
            hidden, cache = prefill(run, any(guided), t.slots)
        with run.clock.phase("sampling"):
            decide(run, first, hidden.expand(-1, len(first), -1), guided[0])
    with run.clock.paused():
        yield run.step(len(first), run.count)

    # 2. The other passes, in windows.
    history = [np.ones(len(run.tokens), np.int64)]
    for first_uncertain in iterate(run, schedule, window, cache):
        history.append(first_uncertain)
        with run.clock.paused():
            yield run.step(int(t.cell_start[first_uncertain.min()]), run.count)
    return _reported(run, schedule, window, np.stack(history))


def padded_rows(schedule: Schedule, window: int) -> int:
    """Rows of an image in the calls of a window of 16-bit weights; no call has more rows or cells.

    They are the same for all windows that are not wider than the side of the image.
    """
    t = schedule.ahead
    stop = np.minimum(np.arange(t.passes) + max(window, schedule.grid), t.passes)
    rows = (t.row_start[stop] - t.row_start[:-1]).max()
    cells = (t.cell_start[stop] - t.cell_start[:-1]).max()
    return ROWS * math.ceil(max(rows, cells) / ROWS)


def _reported(run: TokenRun, schedule: Schedule, window: int, history: np.ndarray) -> TokenSampled:
    """The result of a run in windows, of the first uncertain pass of every image before and after each call, int64
    [calls + 1, B].
    """
    t = schedule.ahead
    decided_at = t.decided_at[:-1]

    # The call that made a cell certain is the first one after which its pass is before the first uncertain one.
    steps = []
    accepted = []
    for of_image in history.T:
        step = np.searchsorted(of_image, decided_at, side="right")
        # The first pass of a window needs no guess.
        first_of_window = of_image[np.maximum(step - 1, 0)]
        steps.append(step)
        accepted.append(decided_at > first_of_window)
    step = np.stack(steps)
    needed_guess = np.stack(accepted)

    # Of all cells that the calls drew, those that are not certain in the end were drawn in vain.
    stop = np.minimum(history[:-1] + window, t.passes)
    drawn = (t.cell_start[stop] - t.cell_start[history[:-1]]).sum()
    certain = len(step) * (run.count - len(schedule.passes[0].cells))
    run.report.add(accepted=needed_guess.sum(), rejected=drawn - certain)

    shape = (len(step), run.grid, run.grid)
    outcome = np.where(needed_guess, ACCEPTED, PLAIN)
    return run.finish(step.astype(np.int32).reshape(shape), outcome.astype(np.uint8).reshape(shape))
