"""How the samplers call the diffusion head.

A :class:`HeadNetwork` is the head's network. For every batch, a sampler makes an object that calls the network with the
conditions of the batch:

- :class:`FullChainHead`: one step after another, for all rows together (``chain.py``). It is a :class:`.ChainHead`.
- :class:`SpeculationHead`: for any states at any steps (``speculation.py``).

Both classes compute the whole network. LazyMAR has another :class:`.ChainHead`, which reuses cached results, see
``mar/lazy/head.py``. In ``mar/``, a :class:`.HeadFactory` makes these objects.

For the letters in shapes (N, P, S, *, c) see ``chain.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..networks.speed import Recordable, recorded
from ..reports.record import Report
from .chain import DiffusionBatch, StepInputs, StepResult, advance

# BitDance and NextStep compute at most this many numbers of modulations at once; see budget in _FullHead.
MODULATION_BUDGET = 1 << 27


class HeadNetwork(Protocol):
    """The network of a diffusion head, see ``networks/mar.py`` and ``networks/bitdance.py``. The *modulations* are the
    scales, shifts and gates of the head's layers. They depend on a condition and a time, but not on the state.
    """

    cond_embed: Any  # a layer that turns conditions [..., D] into embeddings [..., w]

    @property
    def modulation_numbers(self) -> int:
        """How many numbers the modulations of one token contain, at one time and in one branch."""

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """Modulations [..., w'] for embeddings [..., w]. Each embedding is the sum of a condition's and a time's
        embedding.
        """

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """The predictions, fp32 [P, N, *, c]; or fp32 [P, N, *, 2 c] if c variance logits follow the c predictions.

        ``x``: states, fp32 [N, *, c]. ``modulations``: [P, N, *, w'] each.
        """


class _FullHead:
    """What :class:`FullChainHead` and :class:`SpeculationHead` share: the whole diffusion head for the conditions of N
    rows. The report counts the calls.

    One matrix product computes the modulations of many steps, so it reads the weights only once for all these steps.

    Args:
        budget: how many numbers of modulations one product may compute at most. A product always computes at least one
            step (in :class:`SpeculationHead`, one state), even if this one exceeds the budget.
    """

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        self._net = net
        self._head = head
        self._report = report
        self._condition = head.cond_embed(batch.z)

        # Embeddings of the steps' times, [S, 1, N, 1 ..., w], or [S, 1, 1, 1 ..., w] if all rows have the same steps.
        times = batch.table.times
        ones = (1,) * (batch.z.ndim - 3)
        self._times = times.view(len(times), 1, -1, *ones, times.shape[-1])

        # The budget allows ``_rows_at_once`` rows at one step, or ``_steps_at_once`` steps of all rows.
        branches, rows, *tokens, _ = batch.z.shape
        numbers_of_row = branches * math.prod(tokens) * head.modulation_numbers
        self._rows_at_once = max(1, budget // numbers_of_row)
        self._steps_at_once = max(1, budget // max(1, numbers_of_row * rows))


class FullChainHead(_FullHead):
    """Calls the whole head one step after another, for :func:`.chain.run_chain`."""

    # The modulations from the newest product: for each step of the product, a tuple of tensors [P, N, *, w'].
    _newest: Sequence[tuple[Tensor, ...]] = ()

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """See :class:`.chain.ChainHead`."""
        at_once = self._steps_at_once
        if k % at_once == 0:
            modulations = self._head.modulations(self._times[k : k + at_once] + self._condition)
            self._newest = for_each_step(self._net, modulations)

        self._report.add(head_calls=1, head_rows=self._condition.shape[:-1].numel())
        return full_step(self._net, self._head, self._newest[k % at_once], inputs)


def for_each_step(net: Recordable, modulations: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Divide modulations of T steps, [T, ...] each, into the modulations of each step, [...] each."""
    if net.records:  # a function recorded as a CUDA graph copies contiguous tensors fastest
        modulations = [m.contiguous() for m in modulations]
    return list(zip(*modulations, strict=True))


@recorded
def full_step(net: Recordable, head: HeadNetwork, modulations: Sequence[Tensor], inputs: StepInputs) -> StepResult:
    """Call the whole head, and :func:`.advance` all rows with the head's output."""
    out = net.compiled(type(head).denoise, "diffusion head")(head, inputs.x, modulations)
    return net.compiled(advance, "diffusion steps")(inputs, out)


class SpeculationHead(_FullHead):
    """Calls the whole head for any states of N rows, for speculation. The states may be at different steps."""

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        super().__init__(net, head, batch, report, budget)
        self._denoise = net.compiled(type(head).denoise, "diffusion head")

        # The modulations of all rows at all steps, [P, S, N, *, w'] each; None if they exceed the budget.
        self._all_modulations: list[Tensor] | None = None
        if len(batch.table) <= self._steps_at_once:
            self._all_modulations = [m.transpose(0, 1) for m in head.modulations(self._times + self._condition)]

    def at_states(self, row: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """The head's output [P, M, *, c or 2 c] for M states x, fp32 [M, *, c]. Each call of the head fits the budget.

        State i belongs to row ``row[i]`` at step ``k[i]``. Both are int64 [M] on the device. The table of the batch
        must have the same steps for all rows.
        """
        most = self._rows_at_once
        parts = []
        for rows, steps, states in zip(row.split(most), k.split(most), x.split(most), strict=True):
            out = self._denoise(self._head, states, self._modulations_at(rows, steps))
            self._report.add(head_calls=1, head_rows=out.shape[:-1].numel())
            parts.append(out)

        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _modulations_at(self, row: Tensor, k: Tensor) -> list[Tensor]:
        """The modulations [P, M, *, w'] for the rows and steps of :meth:`at_states`."""
        if self._all_modulations is not None:
            return [m[:, k, row] for m in self._all_modulations]

        return self._head.modulations(self._times_at(k) + self._condition[:, row])

    def _times_at(self, k: Tensor) -> Tensor:
        """The time embeddings of the M steps ``k``, int64 [M]: [1, M, 1 ..., w]. All rows of the batch must have the
        same steps.
        """
        times = self._times[k]  # [M, 1, 1, 1 ..., w]
        return times.squeeze(2).transpose(0, 1)  # [M, 1, 1 ..., w] -> [1, M, 1 ..., w]
