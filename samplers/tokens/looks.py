"""The transformer of a token model with its KV cache, and the looks that run the passes of a schedule.

The file has, in this order:

1. :class:`FedRows`: what one call of the transformer feeds;
2. :class:`DeviceTable`: the fed rows of all passes of a schedule, in tensors on the device. ``schedule.py`` states
   which tokens a pass feeds, and ``cache_slots.py`` states which cache slots hold the keys and values of these tokens;
3. :class:`CachedTransformer`: the transformer, which feeds these rows, and its cache;
4. :func:`run_first_pass`: the first pass of a schedule, the *prefill*, in which the transformer reads the condition and
   predicts the first cells;
5. :class:`ScheduleLook`: the *look* (``engine.py``) of the later passes; :func:`later_passes_on_device` is their plan;
6. two small functions, about guided passes and about hidden rows.

Shapes: B images with L cells each; R batch rows, one for each image in each branch of guidance; m fed rows. A *hidden
row* is the transformer's output for a fed row: D numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...networks.llama import Cache
from ...networks.torch_state import to_device
from .cache_slots import ALWAYS, NEVER, CacheSlots, serial_slots
from .canvas import TokenCanvas
from .prepare import PreparedCondition
from .sampling import TokenDraw
from .schedule import Schedule, schedule_table


class FedRows(NamedTuple):
    """The m fed rows of one call of the transformer.

    The tensors are int64 [m] if all images are fed the same rows. Then one index serves all batch rows, so the keys and
    values are written to the cache faster. If the images are fed different rows, the tensors are int64 [B, m].

    ``cache_slot`` and ``cache_end`` count from the first slot of the cache; the first slots belong to the condition.
    """

    cell: Tensor  # cells whose tokens are fed
    position: Tensor  # positions at which the tokens are fed
    cache_slot: Tensor  # slots to which the rows write their keys and values
    cache_end: int  # the rows attend only to slots below this slot
    # bool [..., m, cache_end], True where a row attends to a slot; None: the rows attend to all slots below cache_end.
    mask: Tensor | None = None
    # Index of PAR's transition token; -1 for a row that feeds a cell's token. None if the schedule has no transition
    # tokens.
    transition_token: Tensor | None = None


class DeviceTable:
    """The :class:`.ScheduleTable` of a schedule and its :class:`.CacheSlots`, on a device. The cache begins with
    ``prefix`` slots of the condition, and all fed rows attend to these slots.

    ``table`` and ``slots`` are the two on the host. The other attributes are tensors on the device, int64.

    Shapes: the schedule feeds F rows and decides N cells, and the cache has S image slots.

    - For each fed row, [F + 1]: ``fed_cell``, ``transition_token``, ``position``, ``last_visible`` and ``pass_of_row``
      of the ScheduleTable. ``transition_token`` is None if the schedule has no transition tokens. ``cache_slot`` is the
      slot that the row writes, counted from the first slot of the cache.
    - For each decided cell, [N + 1]: ``predicting_row`` is the index of the row that predicts the cell, counted from
      the first row of the cell's pass. The last entry is not used.
    - For each slot of the cache, [prefix + S]: ``place``, ``written`` and ``replaced`` of the CacheSlots. The entries
      of the condition's slots come first.
    """

    def __init__(self, schedule: Schedule, slots: CacheSlots, prefix: int, device: torch.device):
        table = schedule_table(schedule)
        self.table = table
        self.slots = slots
        self.prefix = prefix

        # 1. For each fed row.
        self.fed_cell = to_device(table.fed_cell, device)
        self.transition_token = to_device(table.transition_token, device) if table.transition_token.max() >= 0 else None
        self.position = to_device(table.position, device)
        self.cache_slot = to_device(slots.of_row + prefix, device)
        self.last_visible = to_device(table.last_visible, device)
        self.pass_of_row = to_device(table.pass_of_row, device)

        # 2. For each decided cell.
        first_row_of_pass = table.row_start[table.pass_of_cell]
        self.predicting_row = to_device(table.row_of_cell - first_row_of_pass, device)

        # 3. For each slot. The condition's slots have the place -1, before all other places, and they are present in
        #    all passes. Every row, even a padding row, therefore attends to them.
        self.place = to_device(np.concatenate([np.full(prefix, -1), slots.place]), device)
        self.written = to_device(np.concatenate([np.full(prefix, ALWAYS), slots.written]), device)
        self.replaced = to_device(np.concatenate([np.full(prefix, NEVER), slots.replaced]), device)

    def pass_rows(self, k: int) -> tuple[FedRows, Tensor]:
        """The fed rows of pass k for a call that feeds only this pass, and the indices of the fed rows that predict the
        n cells of the pass, int64 [n]. The host does not wait for the device.
        """
        table = self.table
        rows = slice(table.row_start[k], table.row_start[k + 1])
        cells = slice(table.cell_start[k], table.cell_start[k + 1])
        fed = self.rows_at(rows, int(self.slots.end[k]), bool(self.slots.needs_mask[k]))
        return fed, self.predicting_row[cells]

    def rows_at(self, index: slice | Tensor, end: int, needs_mask: bool = True) -> FedRows:
        """The fed rows at an ``index`` in the table: a slice, or int64 [...]. Each row attends only to the condition's
        slots and to image slots below ``end``. If ``needs_mask`` is False, each row attends to all of these slots, as
        the caller knows from ``needs_mask`` of the :class:`.CacheSlots`.
        """
        cache_end = self.prefix + end
        return FedRows(
            cell=self.fed_cell[index],
            position=self.position[index],
            cache_slot=self.cache_slot[index],
            cache_end=cache_end,
            mask=self.mask(index, cache_end) if needs_mask else None,
            transition_token=None if self.transition_token is None else self.transition_token[index],
        )

    def mask(self, index: slice | Tensor, cache_end: int) -> Tensor:
        """The attention mask of the fed rows at an ``index`` (see :meth:`rows_at`), bool [..., cache_end]: True where a
        row attends to a slot. A padding row attends to the condition only.
        """
        last_visible = self.last_visible[index][..., None]
        pass_of_row = self.pass_of_row[index][..., None]
        is_visible = self.place[:cache_end] <= last_visible
        is_present = (self.written[:cache_end] <= pass_of_row) & (pass_of_row < self.replaced[:cache_end])
        return is_visible & is_present


class CachedTransformer:
    """The transformer of a generation, with a cache of the keys and values of all rows that it has read. Call
    :meth:`prefill` once to make the cache, and then call :meth:`feed` for every later pass.

    A pass runs in up to three branches. The first branch reads the condition. If ``part_share`` of the
    :class:`.PreparedCondition` is above 0, a second branch reads a part of the condition. If ``null`` is True, the last
    branch reads the null condition. All branches are fed the same image tokens.

    Args:
        canvas: the images; its report counts the work.
        condition: the packed condition.
        first_value: token value of image code 0.
        padded_to: number of fed rows per image to which every call is padded; 0: no padding. See ``one_shape`` in
            ``networks/llama.py``.
    """

    # prefill makes the cache, and sets the number of branches whose keys and values the cache holds. Later passes may
    # feed fewer branches.
    cache: Cache
    cached_branches: int

    def __init__(self, canvas: TokenCanvas, condition: PreparedCondition, first_value: int = 0, padded_to: int = 0):
        self.canvas = canvas
        self.net = canvas.model.net
        self.condition = condition
        self.conditional_branches = condition.conditional_branches  # number of branches without the null branch
        self.first_value = first_value
        self.padded_to = padded_to

    def prefill(self, null: bool, slot_count: int, image: Tensor | None = None) -> Tensor:
        """Make a cache with ``slot_count`` image slots, and read the condition into it.

        ``null``: whether the null branch runs too. ``image``: m tokens that the transformer reads after the condition,
        int64 [B, m]; None: it reads only the condition.

        Returns hidden rows [R, 1 + m, D]. Row i predicts cell i.
        """
        report = self.canvas.report
        condition = self.condition
        branches = self.conditional_branches + int(null)

        # 1. The condition rows, and the embeddings of the image's tokens.
        condition_rows = condition.prefix(self.net, null)
        lengths = None if condition.lengths is None else condition.lengths.repeat(branches)
        image_rows = None if image is None else self.net.tok_embeddings(image).repeat(branches, 1, 1)
        row_count = condition_rows.shape[1] + (0 if image is None else image.shape[1])

        # 2. The pass.
        report.add(transformer_passes=1, transformer_tokens=len(condition_rows) * row_count)
        hidden, self.cache = self.net.prefill(condition_rows, self.canvas.grid[0], slot_count, lengths, image_rows)
        self.cached_branches = branches

        # 3. So far, images with the same prompt shared a batch row in each branch. Now each image gets its own batch
        #    rows: copies of the batch rows of its prompt.
        if condition.prompt_of_image is not None:
            prompts = len(condition.entries)
            rows_to_copy = torch.cat([condition.prompt_of_image + branch * prompts for branch in range(branches)])
            hidden = hidden[rows_to_copy]
            self.cache.keep(rows_to_copy)
        report.add(cache_bytes=self.cache.bytes)
        return hidden

    def feed(self, tokens: Tensor, fed: FedRows, null: bool) -> Tensor:
        """Feed the m rows ``fed``. Returns their hidden rows [R, m, D].

        ``tokens``: the images' tokens so far, int64 [B, L + 1]. ``null``: whether the null branch is fed too.
        """
        # 1. The embeddings of the cells' tokens and of transition tokens.
        cells = fed.cell
        values = tokens[:, cells] if cells.ndim == 1 else tokens.gather(1, cells)
        x = self.net.tok_embeddings(values + self.first_value if self.first_value else values)
        if fed.transition_token is not None:
            transition = self.net.spe_tok_embeddings["special_embeddings"](fed.transition_token.clamp(min=0))
            x = torch.where(fed.transition_token[..., None] >= 0, transition, x)

        # 2. The same fed rows for all branches: tensors [B, ...] become [R, ...]. If all images are fed the same rows,
        #    the tensors of ``fed`` have no dimension for the image, and serve all batch rows as they are.
        branches = self.conditional_branches + int(null)
        position, cache_slot, mask = fed.position, fed.cache_slot, fed.mask
        if branches > 1:
            x = x.repeat(branches, 1, 1)
            if cells.ndim == 2:
                position = position.repeat(branches, 1)
                cache_slot = cache_slot.repeat(branches, 1)
                mask = None if mask is None else mask.repeat(branches, 1, 1)

        # 3. The pass.
        self.canvas.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return self.net.feed(x, position, cache_slot, self.cache, fed.cache_end, mask, rows=self.padded_to)

    def keep(self, remaining: Tensor, images: int) -> None:
        """Keep only some images in the cache, in all branches that the cache holds.

        Args:
            remaining: indices of the A images that stay, among the images in the cache, int64 [A].
            images: number of images in the cache.
        """
        self.cache.keep(torch.cat([remaining + branch * images for branch in range(self.cached_branches)]))


def run_first_pass(
    canvas: TokenCanvas,
    transformer: CachedTransformer,
    draw: TokenDraw,
    schedule: Schedule,
    slot_count: int,
    null: bool,
) -> None:
    """Run the prefill, and decide the cells of the first pass of a schedule. The hidden row of the condition's last
    token predicts all these cells.

    Args:
        canvas: the images to generate.
        transformer: gets a cache with ``slot_count`` image slots.
        draw: samples the tokens.
        schedule: a schedule without known cells.
        slot_count: number of image slots of the cache.
        null: whether the transformer also reads the null condition. If False, no later pass can feed the null branch.
    """
    looking, drawing = canvas.phases
    cells = to_device(np.array(schedule.passes[0].cells, np.int64), canvas.device)
    with canvas.clock.phase(looking):
        hidden = transformer.prefill(null, slot_count)
    with canvas.clock.phase(drawing):
        tokens = draw.of_schedule(schedule)(0, cells, hidden.expand(-1, len(cells), -1))
    canvas.decide(cells, tokens, 0)


class ScheduleLook:
    """Runs all passes of a schedule except the first. :func:`run_first_pass` runs the first pass.

    Args:
        transformer: its cache holds the condition, and the known cells of the schedule except the last.
        schedule: the passes.
        reads_null: for each pass of the schedule, whether it feeds the null branch.
    """

    def __init__(self, transformer: CachedTransformer, schedule: Schedule, reads_null: Sequence[bool]):
        canvas = transformer.canvas
        self.transformer = transformer
        self.reads_null = reads_null
        self.table = DeviceTable(schedule, serial_slots(schedule), transformer.cache.prefix, canvas.device)

    # The schedule states which cells pass k decides, so ``cells`` is not used. The loop of the engine requires both
    # arguments.
    def __call__(self, k: int, cells: Tensor) -> Tensor:
        """Run pass k, and return the hidden rows [R, n, D] that predict its n ``cells``."""
        fed, predicted_by = self.table.pass_rows(k)
        hidden = self.transformer.feed(self.transformer.canvas.values, fed, self.reads_null[k])
        return hidden[:, predicted_by]


def later_passes_on_device(schedule: Schedule, device: torch.device) -> dict[int, Tensor]:
    """The plan of all passes after the first one, for :func:`.engine.run_passes`: for each pass, the cells that it
    decides, int64 [n] on the device.
    """
    table = schedule_table(schedule)
    cells = to_device(torch.from_numpy(table.cells[:-1]), device)
    cell_counts = np.diff(table.cell_start)  # number of cells of each pass
    plan = dict(enumerate(cells.split(cell_counts.tolist())))
    del plan[0]
    return plan


def last_guided_pass(guided: Sequence[bool]) -> int:
    """The last pass with guidance; -1 if there is none. ``guided``: for each pass, whether it has guidance."""
    return max((k for k, is_guided in enumerate(guided) if is_guided), default=-1)


def chosen_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Choose n of the m ``hidden`` rows, [R, m, D], by ``index``, int64 [B, n]. All branches use the same index.
    Returns [R, n, D].
    """
    branches = len(hidden) // len(index)  # R / B
    index_of_batch_row = index.repeat(branches, 1)[..., None]
    return hidden.gather(1, index_of_batch_row.expand(-1, -1, hidden.shape[-1]))
