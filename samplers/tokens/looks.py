"""The transformer of a token model with its KV cache, and the look that runs the passes of a schedule.

:class:`CachedTransformer` feeds tokens. :class:`ScheduleLook` is a *look* (``engine.py``): it runs the transformer in
each pass after the prefill. ``device_table.py`` has the fed rows of each pass.

Shapes: B images with L cells each; R batch rows, one for each image in each branch of guidance; m fed rows. A *hidden
row* is the transformer's output for a fed row: C numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...networks.llama import Cache
from .cache_slots import serial_slots
from .canvas import TokenCanvas
from .device_table import DeviceTable, FedRows
from .prepare import PreparedCondition
from .schedule import Schedule


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

    cache: Cache  # prefill makes it

    def __init__(self, canvas: TokenCanvas, condition: PreparedCondition, first_value: int = 0, padded_to: int = 0):
        self.canvas = canvas
        self.net = canvas.model.net
        self.condition = condition
        self.conditional_branches = condition.conditional_branches  # number of branches without the null branch
        self.first_value = first_value
        self.padded_to = padded_to

    def prefill(self, null: bool, slots: int, image: Tensor | None = None) -> Tensor:
        """Make a cache with ``slots`` image slots, and read the condition into it.

        ``null``: whether the null branch runs too. ``image``: m tokens that the transformer reads after the condition,
        int64 [B, m]; None: it reads only the condition.

        Returns hidden rows [R, 1 + m, C]. Row i predicts cell i.
        """
        report = self.canvas.report
        condition = self.condition
        branches = self._branch_count(null)

        # 1. The condition rows, and the embeddings of the image's tokens.
        rows = condition.prefix(self.net, null)
        lengths = None if condition.lengths is None else condition.lengths.repeat(branches)
        x = None if image is None else self.net.tok_embeddings(image).repeat(branches, 1, 1)
        row_count = rows.shape[1] + (0 if image is None else image.shape[1])

        # 2. The pass.
        report.add(transformer_passes=1, transformer_tokens=len(rows) * row_count)
        hidden, self.cache = self.net.prefill(rows, self.canvas.grid[0], slots, lengths, x)

        # 3. Images with the same prompt shared one prefill. Now each image gets its own batch rows.
        if condition.prompt_of_image is not None:
            prompts = len(condition.entries)
            row_of_image = torch.cat([condition.prompt_of_image + branch * prompts for branch in range(branches)])
            hidden = hidden[row_of_image]
            self.cache.keep(row_of_image)
        report.add(cache_bytes=self.cache.bytes)
        return hidden

    def feed(self, tokens: Tensor, fed: FedRows, null: bool) -> Tensor:
        """Feed the m rows ``fed``. Returns their hidden rows [R, m, C].

        ``tokens``: the images' tokens so far, int64 [B, L + 1]. ``null``: whether the null branch is fed too.
        """
        # 1. The embeddings of the cells' tokens and of transition tokens.
        cells = fed.cell
        values = tokens[:, cells] if cells.ndim == 1 else tokens.gather(1, cells)
        x = self.net.tok_embeddings(values + self.first_value if self.first_value else values)
        if fed.transition_token is not None:
            transition = self.net.spe_tok_embeddings["special_embeddings"](fed.transition_token.clamp(min=0))
            x = torch.where(fed.transition_token[..., None] >= 0, transition, x)

        # 2. The same fed rows for all branches.
        branches = self._branch_count(null)
        position, cache_slot, mask = fed.position, fed.cache_slot, fed.mask
        if branches > 1:
            x = x.repeat(branches, 1, 1)
        if branches > 1 and cells.ndim == 2:  # the images have different rows
            position = position.repeat(branches, 1)
            cache_slot = cache_slot.repeat(branches, 1)
            mask = None if mask is None else mask.repeat(branches, 1, 1)

        # 3. The pass.
        self.canvas.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
        return self.net.feed(x, position, cache_slot, self.cache, fed.cache_end, mask, rows=self.padded_to)

    def _branch_count(self, null: bool) -> int:
        """Number of branches that a pass runs. ``null``: whether the null branch runs too."""
        return self.conditional_branches + 1 if null else self.conditional_branches

    def keep(self, remaining: Tensor, images: int) -> None:
        """Keep only some images in the cache, in all branches that the cache holds.

        Args:
            remaining: indices of the A images that stay, among the images in the cache, int64 [A].
            images: number of images in the cache.
        """
        branches = len(self.cache.blocks[0]) // images
        self.cache.keep(torch.cat([remaining + branch * images for branch in range(branches)]))


class ScheduleLook:
    """Runs all passes of a schedule except the first. :func:`.first_pass.run_first_pass` runs the first pass.

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

    def __call__(self, k: int, cells: Tensor) -> Tensor:
        """Run pass k, and return the hidden rows [R, n, C] that predict its n ``cells``."""
        fed, predicted_by = self.table.pass_rows(k)
        hidden = self.transformer.feed(self.transformer.canvas.values, fed, self.reads_null[k])
        return hidden[:, predicted_by]


def last_guided_pass(guided: Sequence[bool]) -> int:
    """The last pass with guidance; -1 if there is none. ``guided``: for each pass, whether it has guidance."""
    return max((k for k, is_guided in enumerate(guided) if is_guided), default=-1)


def chosen_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Choose n of the m ``hidden`` rows, [R, m, C], by ``index``, int64 [B, n]. All branches use the same index.
    Returns [R, n, C].
    """
    index = index.repeat(len(hidden) // len(index), 1)[..., None]
    return hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
