"""Exact parallel decoding: Jacobi iteration on a window of passes, with the draws of serial decoding.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023, arXiv
2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi
Decoding" (ICLR 2025, arXiv 2410.01699). There, a probabilistic test accepts tokens, and the images are other ones than those of
serial decoding. Here the random numbers belong to (seed, image, cell, value), so that a token is a function of its logits: the
fixed point of the iteration is the image of serial decoding itself, and no test is needed.

A call evaluates the W passes from the first one that is not certain, in every image. Images advance independently, and the host reads
their positions after each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.llama import Cache
from ...reports.record import ACCEPTED, PLAIN
from ..driver import to_device
from .loop import TokenRun, TokenSampler, decide, feed, guide, prefill, sample
from .schedule import Schedule

# On a CPU, batches of this size and more gain little or nothing from a window.
_CPU_BATCH = 4


def iterate(run: TokenRun, schedule: Schedule, window: int, cache: Cache, shrink: bool = True) -> Iterator[np.ndarray]:
    """The passes after the first one by Jacobi iteration with a window of W; yields the first uncertain pass of every image, int64 [B].

    Args:
        run: its tokens hold the cells of the first pass and the known ones, and receive certain tokens and guesses.
        cache: with at least ``schedule.ahead.slots`` image slots.
        shrink: whether finished images leave the batch and the cache.
    """
    t, device, count = schedule.ahead, run.device, len(run.tokens)
    guided = run.guided(schedule)
    most_cells = int((t.cell_start[np.minimum(np.arange(t.passes) + window, t.passes)] - t.cell_start[:-1]).max())
    last_guided = max((k for k, g in enumerate(guided) if g), default=-1)
    guided_cells = np.array([*guided, False])[t.cell_pass]
    every = np.ones(count, np.int64)
    live, of, at = run, np.arange(count), every  # the images that are still in the batch
    # All tokens of the first window start as a copy of the newest one.
    newest = int(t.cells[t.cell_start[1] - 1]) if t.cell_start[1] else schedule.known - 1
    with torch.inference_mode():
        entering, _ = _entries(t.cell_start, at, at + window, most_cells, len(t.cells) - 1)
        _guess(run.tokens, to_device(t.cells[entering], device), run.tokens[:, newest : newest + 1].clone())
    while every.min() < t.passes:
        with torch.inference_mode():
            # 1. The rows of W passes are fed at once, with the tokens so far: certain ones and guesses. Every row attends to the slots
            #    that it attends to in its own serial pass. Keys and values replace those of the last call.
            stop, null = np.minimum(at + window, t.passes), bool(at.min() <= last_guided)
            rows, _ = _entries(t.row_start, at, stop, int((t.row_start[stop] - t.row_start[at]).max()), len(t.fed) - 1)
            width = int((t.cell_start[stop] - t.cell_start[at]).max())
            entries, inside = _entries(t.cell_start, at, stop, width, len(t.cells) - 1)
            end = int(max(t.pass_end[a:b].max(initial=0) for a, b in zip(at, stop, strict=True)))
            visible = np.pad(t.visible[rows, :end], ((0, 0), (0, 0), (cache.prefix, 0)), constant_values=True)
            predicted_by = (t.cell_row[entries] - t.row_start[at][:, None]).clip(min=0)
            arrays = t.fed[rows], t.position[rows], t.slot[rows] + cache.prefix, visible, t.cells[entries], predicted_by
            fed, position, slot, mask, cells, index = (to_device(a, device) for a in arrays)
            if len(at) == 1:  # slots that the batch rows share are written faster
                fed, position, slot, mask = fed[0], position[0], slot[0], mask[0]
            with run.clock.phase(run.phases[0]):
                hidden = feed(live, cache, fed, position, slot, null, cache.prefix + end, mask)
                index = (torch.cat([index, index]) if null else index)[..., None]
                hidden = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
            # 2. The cells of the W passes are drawn, from the same noise in every call.
            with run.clock.phase(run.phases[1]):
                mixed = guided_cells[entries]
                logits = guide(live, hidden, null and (bool(mixed.all()) or to_device(mixed, device)))
                new = sample(live, logits, cells)
            # 3. The first pass is certain, because its input is. The following pass is certain if no token of the passes before it
            #    changed, and so on. A window moves by one pass at least, so that no image takes more calls than serially.
            unchanged = (new == live.tokens.gather(1, cells)) | ~to_device(inside, device)
            live.tokens.scatter_(1, cells, new)
            leading = unchanged.cumprod(1).sum(1).cpu().numpy()  # the host waits here
            last = t.cell_start[stop] - 1
            at = t.cell_pass[np.minimum(t.cell_start[at] + leading, last)] + 1
            every = every.copy()
            every[of] = at
            run.decided = to_device(np.append(t.decided_at, t.passes) < every[:, None], device)
            # 4. Tokens that enter the window start as a copy of the newest one.
            entering, _ = _entries(t.cell_start, stop, stop + window, most_cells, len(t.cells) - 1)
            newest_token = new.gather(1, to_device((last - entries[:, 0]).clip(min=0), device)[:, None])
            _guess(live.tokens, to_device(t.cells[entering], device), newest_token)
            if live is not run:
                run.tokens.index_copy_(0, to_device(of, device), live.tokens)
            # 5. Finished images leave the batch.
            left = np.flatnonzero(at < t.passes)
            if shrink and 0 < len(left) < len(at):
                index, halves = to_device(left, device), len(cache.blocks[0]) // len(at)
                cache.keep(torch.cat([index + half * len(at) for half in range(halves)]))
                tokens, of, at = live.tokens[index], of[left], at[left]
                given = None if run.given is None else run.given[of.tolist()]
                live = replace(run, draws=run.draws.of(of.tolist()), given=given)
                live.tokens = tokens
        yield every


def _guess(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set cells int64 [L, n] to a token int64 [L, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))


def _entries(
    starts: np.ndarray, first: np.ndarray, stop: np.ndarray, count: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of the passes ``first`` to ``stop`` - 1 of every image, int64 [L, count], and where they are not padding."""
    begin, end = starts[first], starts[np.minimum(stop, len(starts) - 1)]
    entries = begin[:, None] + np.arange(count)
    inside = entries < end[:, None]
    return np.where(inside, entries, padding), inside


def windows(run: TokenRun, schedule: Schedule, window: int) -> TokenSampler:
    """Decode a schedule in windows; yields steps after the prefill and after each call.

    ``done`` of a step counts the certain cells of the image that has the fewest, and ``total`` the cells; guesses count as
    undecided. The report also counts the guesses that a call accepted and those that it drew but did not accept. Map "step"
    is the call that made a cell certain, "outcome" whether that needed a guess (ACCEPTED) or not.
    """
    if schedule.unwritten_visible:  # a window writes slots before the rows that should see them blank
        why = "the blanks of mask_undecoded off cannot be decoded in a window"
        raise UserError(f"parallel: {why}; switch mask_undecoded on, or set parallel to 0.")
    if run.device.type == "cpu" and len(run.tokens) >= _CPU_BATCH:
        hint = f"parallel: a window feeds 4 times the rows; on a CPU with {_CPU_BATCH} images or more, compare with 0."
        run.report.note = "; ".join(filter(None, (run.report.note, hint)))
    t, guided, first = schedule.ahead, run.guided(schedule), torch.tensor(schedule.passes[0].cells, device=run.device)
    with torch.inference_mode():
        with run.clock.phase("transformer"):
            hidden, cache = prefill(run, any(guided), t.slots)
        with run.clock.phase("sampling"):
            decide(run, first, hidden.expand(-1, len(first), -1), guided[0])
    with run.clock.paused():
        yield run.step(len(first), run.count)
    history = [np.ones(len(run.tokens), np.int64)]
    for certain in iterate(run, schedule, window, cache):
        history.append(certain)
        with run.clock.paused():
            yield run.step(int(t.cell_start[certain.min()]), run.count)

    at = np.stack(history)
    evaluated = (t.cell_start[np.minimum(at[:-1] + window, t.passes)] - t.cell_start[at[:-1]]).sum()
    step = np.stack([np.searchsorted(of_image, t.decided_at, side="right") for of_image in at.T])
    # The first pass of a window needs no guess.
    accepted = t.decided_at > np.take_along_axis(at, np.maximum(step - 1, 0).T, axis=0).T
    run.report.add(accepted=accepted.sum(), rejected=evaluated - (run.count - len(first)) * len(step))
    outcome, shape = np.where(accepted, ACCEPTED, PLAIN), (len(run.tokens), run.grid, run.grid)
    return run.finish(step.astype(np.int32).reshape(shape), outcome.astype(np.uint8).reshape(shape))
