"""The transformer of token models with its KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...model_loaders.networks.llama import Cache
from .cache_slots import DeviceTable, FedRows, table_of
from .canvas import TokenCanvas
from .prepare import PreparedCondition
from .schedule import Schedule


class CachedTransformer:
    """The transformer of a generation, with the keys and values of what it has read: :meth:`prefill` once, which makes
    the cache, then :meth:`feed` for every pass.

    A pass has R batch rows: those of the condition, one an image, of a part of it where there is one, and with guidance
    those of the null condition, which are left out where ``null`` is False.

    Args:
        canvas: whose report counts the work.
        condition: the packed condition.
        first_value: token value of image code 0.
        padded_to: fed rows of an image that every call is padded to, see one_shape in networks/llama.py; 0 for none.
    """

    cache: Cache  # of prefill

    def __init__(self, canvas: TokenCanvas, condition: PreparedCondition, first_value: int = 0, padded_to: int = 0):
        self.canvas = canvas
        self.net = canvas.model.net
        self.condition = condition
        self.first_value = first_value
        self.padded_to = padded_to

    def prefill(self, null: bool, slots: int, image: Tensor | None = None) -> Tensor:
        """Run the condition, alone or with the cells ``image`` int64 [B, m] behind it, into a cache with ``slots``
        image slots.

        Returns hidden rows [R, 1 + m, C], of which row i predicts cell i.
        """
        report = self.canvas.report
        condition = self.condition
        branches = condition.branches(null)

        rows = condition.prefix(self.net, null)
        lengths = None if condition.lengths is None else condition.lengths.repeat(branches)
        x = None if image is None else self.net.tok_embeddings(image).repeat(branches, 1, 1)
        fed = rows.shape[1] + (0 if image is None else image.shape[1])
        report.add(transformer_passes=1, transformer_tokens=len(rows) * fed)
        hidden, self.cache = self.net.prefill(rows, self.canvas.grid[0], slots, lengths, x)

        # Images of one prompt share its prefill.
        if condition.images is not None:
            prompts = len(condition.condition)
            of_all = torch.cat([condition.images + branch * prompts for branch in range(branches)])
            hidden = hidden[of_all]
            self.cache.keep(of_all)
        report.add(cache_bytes=self.cache.bytes)
        return hidden

    def feed(self, tokens: Tensor, rows: FedRows, null: bool) -> Tensor:
        """Hidden rows [R, m, C] of a pass that feeds ``rows`` of the tokens int64 [B, N + 1]."""
        # 1. Embeddings, of transition tokens too.
        cells = rows.cell
        values = tokens[:, cells] if cells.ndim == 1 else tokens.gather(1, cells)
        x = self.net.tok_embeddings(values + self.first_value if self.first_value else values)
        if rows.special is not None:
            transition = self.net.spe_tok_embeddings["special_embeddings"](rows.special.clamp(min=0))
            x = torch.where(rows.special[..., None] >= 0, transition, x)

        # 2. All branches are fed the same tokens.
        position = rows.position
        slot = rows.slot
        mask = rows.mask
        branches = self.condition.branches(null)
        if branches > 1:
            x = torch.cat([x] * branches)
            if position.ndim == 2:
                position = torch.cat([position] * branches)
                slot = torch.cat([slot] * branches)
                mask = None if mask is None else torch.cat([mask] * branches)

        # 3. The pass.
        self.canvas.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return self.net.feed(x, position, slot, self.cache, rows.end, mask, rows=self.padded_to)

    def keep(self, left: Tensor, images: int) -> None:
        """Leave only some of the present ``images`` in the cache, by their places int64 [L], in the branches of
        guidance that it holds.
        """
        branches = len(self.cache.blocks[0]) // images
        self.cache.keep(torch.cat([left + branch * images for branch in range(branches)]))


class ScheduleLook(CachedTransformer):
    """The passes of a schedule one after another; the first one is the prefill.

    The null condition is run up to the last guided pass.
    """

    table: DeviceTable  # made in the first pass, because the prefill tells the number of slots before the image's

    def __init__(
        self, canvas: TokenCanvas, condition: PreparedCondition, schedule: Schedule, guided: Sequence[bool], **more: int
    ):
        """``guided``: of each pass whether guidance is applied; ``more``: as :class:`CachedTransformer`."""
        super().__init__(canvas, condition, **more)
        self.schedule = schedule
        self.last_guided = max((k for k, is_guided in enumerate(guided) if is_guided), default=-1)

    def __call__(self, k: int, cells: Tensor) -> Tensor:
        """Hidden rows [R, n, C] that predict the cells of pass k."""
        if k == 0:
            t = table_of(self.schedule, one_by_one=True)
            hidden = self.prefill(self.last_guided >= 0, t.slots - 1)  # without the slot of padding
            self.table = DeviceTable(t, self.cache.prefix, self.canvas.device)
            return hidden.expand(-1, len(cells), -1)

        p = self.table.at(k)
        return self.feed(self.canvas.values, p.fed, k <= self.last_guided)[:, p.predicted_by]


def chosen_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` int64 [B, n] of hidden rows [R, m, C], the same in all branches: [R, n, C]."""
    index = index.repeat(len(hidden) // len(index), 1)[..., None]
    return hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
