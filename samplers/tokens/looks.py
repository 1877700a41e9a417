"""What each pass of a token model feeds to the transformer, and the transformer with its KV cache.

``schedule.py`` says which cells a pass feeds, and ``cache_slots.py`` says where the cache holds their keys and values.
:class:`DeviceTable` turns both into tensors. :class:`CachedTransformer` feeds the rows of a pass. :class:`ScheduleLook`
is the *look* of a generation: the function that runs the transformer for each pass (``engine.py``).

Shapes: B images with L cells each, and hidden rows (outputs of the transformer) of width C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...networks.llama import Cache
from ...networks.torch_state import to_device
from .cache_slots import Table, serial_table
from .canvas import TokenCanvas
from .prepare import PreparedCondition
from .schedule import Schedule


class FedRows(NamedTuple):
    """The m rows that one call of the transformer feeds, int64 [m], or [B, m] if the images have different rows.
    ``cache_slot`` and ``cache_end`` count from the first slot of the cache, which belongs to the condition.
    """

    cell: Tensor  # cells whose tokens are fed
    position: Tensor  # positions at which the tokens are fed
    cache_slot: Tensor  # slots to which the rows write their keys and values
    cache_end: int  # the rows attend to slots below this one only
    mask: Tensor | None = None  # bool [..., m, cache_end], True where a row attends to a slot; None: everywhere
    # Number of PAR's transition token that is fed instead of a cell's token, else -1; None without transition tokens.
    transition_token: Tensor | None = None


class DeviceTable:
    """A :class:`.Table` on a device. The cache begins with ``prefix`` slots of the condition, and all fed rows attend
    to these slots.

    Attributes:
        host: the table, on the host.
        fed_cell, transition_token, position, last_visible, row_pass: as in the table; but ``transition_token`` is None
            if the schedule feeds no transition tokens.
        row_in_pass: for each cell the row that predicts it, counted from the first row of the pass.
        cache_slot: for each row the slot that it writes, counted from the first slot of the cache.
        place, written, replaced: as in the table, but with the slots of the condition before the slots of the image.
    """

    def __init__(self, table: Table, prefix: int, device: torch.device):
        self.host = table
        self.prefix = prefix

        self.fed_cell = to_device(table.fed_cell, device)
        self.transition_token = to_device(table.transition_token, device) if table.transition_token.max() >= 0 else None
        self.position = to_device(table.position, device)
        self.cache_slot = to_device(table.slot + prefix, device)
        self.last_visible = to_device(table.last_visible, device)
        self.row_pass = to_device(table.row_pass, device)

        self.row_in_pass = to_device(table.cell_row - table.row_start[table.cell_pass], device)

        # The condition's slots come first. Every row attends to them: their place, -1, is visible to all rows, and no
        # pass writes or replaces them.
        self.place = to_device(np.concatenate([np.full(prefix, -1), table.place]), device)
        self.written = to_device(np.concatenate([np.full(prefix, -1), table.written]), device)
        self.replaced = to_device(np.concatenate([np.full(prefix, table.passes), table.replaced]), device)

    def pass_rows(self, k: int) -> tuple[FedRows, Tensor]:
        """The rows that pass k feeds, and for each cell of the pass the index of the row that predicts it, int64 [n].
        The table must be a :func:`.serial_table`. The host does not wait for the device.
        """
        table = self.host
        rows = slice(table.row_start[k], table.row_start[k + 1])
        cells = slice(table.cell_start[k], table.cell_start[k + 1])
        return self.rows_at(rows, int(table.end[k]), bool(table.needs_mask[k])), self.row_in_pass[cells]

    def rows_at(self, index: slice | Tensor, end: int, needs_mask: bool = True) -> FedRows:
        """The fed rows at an ``index``: a slice, or int64 [...]. Each row attends to slots of the condition and to
        image slots below ``end``. If ``needs_mask`` is False, each row attends to all of these slots.
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
        k = self.row_pass[index][..., None]
        is_visible = self.place[:cache_end] <= last_visible
        is_present = (self.written[:cache_end] <= k) & (k < self.replaced[:cache_end])
        return is_visible & is_present


def plan_from_table(table: Table, device: torch.device) -> dict[int, Tensor]:
    """The cells that every pass decides, int64 [n] on the device. :func:`.engine.run_passes` takes them as its plan."""
    cells = to_device(torch.from_numpy(table.cells[:-1]), device)
    return dict(enumerate(cells.split(np.diff(table.cell_start).tolist())))


class CachedTransformer:
    """The transformer of a generation, with a cache of the keys and values of everything that it has read. Call
    :meth:`prefill` once, which makes the cache, and then :meth:`feed` for every pass.

    A pass runs in up to three branches. The first branch reads the condition. The second branch reads a part of the
    condition, if :class:`.PreparedCondition` has a part. The last branch reads the null condition, if ``null`` is True.
    All branches are fed the same image tokens. R is the number of batch rows, one for each image in each branch.

    Args:
        canvas: the images; its report counts the work.
        condition: the packed condition.
        first_value: token value of image code 0.
        padded_to: number of rows per image to which every call is padded, see ``one_shape`` in ``networks/llama.py``;
            0: no padding.
    """

    cache: Cache  # made by prefill
    passes: int = 0  # calls of prefill and feed so far

    def __init__(self, canvas: TokenCanvas, condition: PreparedCondition, first_value: int = 0, padded_to: int = 0):
        self.canvas = canvas
        self.net = canvas.model.net
        self.condition = condition
        self.conditional_branches = condition.conditional_branches  # number of branches without the null branch
        self.first_value = first_value
        self.padded_to = padded_to

    def prefill(self, null: bool, slots: int, image: Tensor | None = None) -> Tensor:
        """Make a cache with ``slots`` image slots, and read the condition into it, alone or followed by m tokens of the
        ``image``, int64 [B, m]. ``null``: whether the null branch runs too.

        Returns hidden rows [R, 1 + m, C]. Row i predicts cell i.
        """
        report = self.canvas.report
        condition = self.condition
        branches = self.conditional_branches + null

        # 1. The rows of the condition, and of the image.
        rows = condition.prefix(self.net, null)
        lengths = None if condition.lengths is None else condition.lengths.repeat(branches)
        x = None if image is None else self.net.tok_embeddings(image).repeat(branches, 1, 1)
        row_count = rows.shape[1] + (0 if image is None else image.shape[1])

        # 2. The pass.
        self.passes += 1
        report.add(transformer_passes=1, transformer_tokens=len(rows) * row_count)
        hidden, self.cache = self.net.prefill(rows, self.canvas.grid[0], slots, lengths, x)

        # 3. Images with the same prompt have shared its prefill. Now each image gets its own batch rows.
        if condition.prompt_of_image is not None:
            prompts = len(condition.condition)
            row_of_image = torch.cat([condition.prompt_of_image + branch * prompts for branch in range(branches)])
            hidden = hidden[row_of_image]
            self.cache.keep(row_of_image)
        report.add(cache_bytes=self.cache.bytes)
        return hidden

    def feed(self, tokens: Tensor, fed: FedRows, null: bool) -> Tensor:
        """Feed the rows ``fed``; returns hidden rows [R, m, C].

        ``tokens``: the images' tokens so far, int64 [B, L + 1]. ``null``: whether the null branch is fed too.
        """
        # 1. The embeddings of the cells' tokens and of transition tokens.
        cells = fed.cell
        values = tokens[:, cells] if cells.ndim == 1 else tokens.gather(1, cells)
        x = self.net.tok_embeddings(values + self.first_value if self.first_value else values)
        if fed.transition_token is not None:
            transition = self.net.spe_tok_embeddings["special_embeddings"](fed.transition_token.clamp(min=0))
            x = torch.where(fed.transition_token[..., None] >= 0, transition, x)

        # 2. The same rows for all branches.
        branches = self.conditional_branches + null
        position, cache_slot, mask = fed.position, fed.cache_slot, fed.mask
        if branches > 1:
            x = x.repeat(branches, 1, 1)
        if branches > 1 and cells.ndim == 2:  # the images have different rows
            position = position.repeat(branches, 1)
            cache_slot = cache_slot.repeat(branches, 1)
            mask = None if mask is None else mask.repeat(branches, 1, 1)

        # 3. The pass.
        self.passes += 1
        self.canvas.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return self.net.feed(x, position, cache_slot, self.cache, fed.cache_end, mask, rows=self.padded_to)

    def keep(self, remaining: Tensor, images: int) -> None:
        """Keep only some images in the cache, in all branches that the cache holds.

        Args:
            remaining: indices of the A images to keep, among the images in the cache, int64 [A].
            images: number of images in the cache.
        """
        branches = len(self.cache.blocks[0]) // images
        self.cache.keep(torch.cat([remaining + branch * images for branch in range(branches)]))


class ScheduleLook(CachedTransformer):
    """Runs the passes of a schedule one after another; the first pass is the prefill.

    Args:
        canvas, condition, first_value: as for :class:`CachedTransformer`.
        schedule: the passes.
        last_guided: the last pass that reads the null condition. Below 0, no pass reads it; at math.inf, all passes do.
        slots: number of image slots of the cache; None: the number that the schedule needs.
    """

    table: DeviceTable  # made after the prefill, because it depends on the number of the condition's slots

    def __init__(
        self,
        canvas: TokenCanvas,
        condition: PreparedCondition,
        schedule: Schedule,
        last_guided: float,
        slots: int | None = None,
        *,
        first_value: int = 0,
    ):
        super().__init__(canvas, condition, first_value)
        self.schedule = schedule
        self.last_guided = last_guided
        self.slots = slots

    def __call__(self, k: int, cells: Tensor) -> Tensor:
        """Run pass k, and return the hidden rows [R, n, C] that predict its n ``cells``."""
        if k == 0:
            slots = serial_table(self.schedule).slots_without_padding if self.slots is None else self.slots
            hidden = self.prefill(self.last_guided >= 0, slots)
            self.follow(self.schedule)
            return hidden.expand(-1, len(cells), -1)

        fed, predicted_by = self.table.pass_rows(k)
        return self.feed(self.canvas.values, fed, k <= self.last_guided)[:, predicted_by]

    def follow(self, schedule: Schedule) -> None:
        """Feed the passes of ``schedule`` from now on. The cache must already hold its known cells."""
        self.schedule = schedule
        self.table = DeviceTable(serial_table(schedule), self.cache.prefix, self.canvas.device)


def last_guided_pass(guided: Sequence[bool]) -> int:
    """The last pass with guidance; -1 if there is none. ``guided``: for each pass, whether it has guidance."""
    return max((k for k, is_guided in enumerate(guided) if is_guided), default=-1)


def chosen_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Choose n of the m ``hidden`` rows, [R, m, C], by their ``index``, int64 [B, n], which is the same in all
    branches. Returns [R, n, C].
    """
    index = index.repeat(len(hidden) // len(index), 1)[..., None]
    return hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
