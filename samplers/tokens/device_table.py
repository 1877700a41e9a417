"""What each pass of a token model feeds to the transformer, in tensors on the device.

``schedule_table.py`` states which tokens a pass feeds, and ``cache_slots.py`` states which cache slots hold the keys
and values of these tokens. :class:`DeviceTable` copies these facts to the device, and returns the :class:`FedRows` of
each pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...networks.torch_state import to_device
from .cache_slots import ALWAYS, NEVER, CacheSlots
from .schedule import Schedule
from .schedule_table import schedule_table


class FedRows(NamedTuple):
    """The m fed rows of one call of the transformer. The tensors are int64 [m], or [B, m] if the images have different
    rows. ``cache_slot`` and ``cache_end`` count from the first slot of the cache; the first slots belong to the
    condition.
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

    Attributes:
        table, slots: the :class:`.ScheduleTable` and the :class:`.CacheSlots`, on the host.
        fed_cell: for each fed row, the cell whose token is fed.
        transition_token: for each fed row, the index of PAR's transition token, or -1; None if the schedule feeds no
            transition tokens.
        position: for each fed row, the position at which the token is fed.
        cache_slot: for each fed row, the slot that it writes, counted from the first slot of the cache.
        last_visible: for each fed row, the last place to which the row attends.
        row_pass: for each fed row, the pass that feeds it.
        row_in_pass: for each cell, the index of the row that predicts the cell, counted from the pass's first row.
        place: for each slot of the cache, the place that the slot holds; -1 for the condition's slots.
        written: for each slot, the first pass in which the slot is visible.
        replaced: for each slot, the first pass in which a different slot holds the place of this slot.
    """

    def __init__(self, schedule: Schedule, slots: CacheSlots, prefix: int, device: torch.device):
        table = schedule_table(schedule)
        self.table = table
        self.slots = slots
        self.prefix = prefix

        self.fed_cell = to_device(table.fed_cell, device)
        self.transition_token = to_device(table.transition_token, device) if table.transition_token.max() >= 0 else None
        self.position = to_device(table.position, device)
        self.cache_slot = to_device(slots.of_row + prefix, device)
        self.last_visible = to_device(table.last_visible, device)
        self.row_pass = to_device(table.row_pass, device)

        self.row_in_pass = to_device(table.cell_row - table.row_start[table.cell_pass], device)

        # The condition's slots come first. Their place is -1, before all other places, and they are present in all
        # passes. Every row therefore attends to the condition's slots.
        self.place = to_device(np.concatenate([np.full(prefix, -1), slots.place]), device)
        self.written = to_device(np.concatenate([np.full(prefix, ALWAYS), slots.written]), device)
        self.replaced = to_device(np.concatenate([np.full(prefix, NEVER), slots.replaced]), device)

    def pass_rows(self, k: int) -> tuple[FedRows, Tensor]:
        """The fed rows of pass k, and the indices of the fed rows that predict the n cells of the pass, int64 [n]. The
        slots must be :func:`.serial_slots`. The host does not wait for the device.
        """
        table = self.table
        rows = slice(table.row_start[k], table.row_start[k + 1])
        cells = slice(table.cell_start[k], table.cell_start[k + 1])
        fed = self.rows_at(rows, int(self.slots.end[k]), bool(self.slots.needs_mask[k]))
        return fed, self.row_in_pass[cells]

    def rows_at(self, index: slice | Tensor, end: int, needs_mask: bool = True) -> FedRows:
        """The fed rows at an ``index`` in the table: a slice, or int64 [...]. Each row attends only to the condition's
        slots and to image slots below ``end``. If ``needs_mask`` is False, each row attends to all of these slots.
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


def later_passes_on_device(schedule: Schedule, device: torch.device) -> dict[int, Tensor]:
    """The plan for :func:`.engine.run_passes` of the passes after the first one: for each pass, the cells that it
    decides, int64 [n] on the device.
    """
    table = schedule_table(schedule)
    cells = to_device(torch.from_numpy(table.cells[:-1]), device)
    plan = dict(enumerate(cells.split(np.diff(table.cell_start).tolist())))
    del plan[0]
    return plan
