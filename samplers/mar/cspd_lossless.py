"""CSpD's mode ``lossless``: the target's distribution, whatever the draft (see ``cspd.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..noise import CounterRNG, copied
from .coupling import Gaussian
from .cspd_models import Drafted, Segments
from .loop import Conditions, Run
from .speculative import Drafts


class Lossless(Segments):
    """A drafted diffusion path is kept up to its first rejected step; the coupling replaces that step."""

    def judge(
        self, run: Run, steps: Sequence[int], drafted: Sequence[Drafted], zs: Sequence[Conditions]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [B, n, channels] of AR steps in turn, and which are the draft's, bool [B, n], also on the host."""
        image, position, scale, blocks = self.rows(run, steps)
        start, count, temperature = self.noise(image, position), len(run.tables), run.settings.temperature
        rows = self.real.rows(
            Conditions.join([z.flat() for z in zs]), scale, *start, CounterRNG(self.keys[image, position])
        )
        path = torch.cat([d.trace.path for d in drafted])
        mean, log_std = (torch.cat(x) for x in zip(*(d.trace.kernel for d in drafted), strict=True))
        log_std = log_std + (math.log(temperature) if temperature else -math.inf)
        log_std[:, -1] = -math.inf
        done = self.real.verify(
            rows, torch.arange(len(path)), Drafts(path, Gaussian(mean, log_std), torch.full((len(path),), count))
        )
        run.report.add(drafted_steps=len(path) * count)
        at = 0
        for block in blocks:
            shape, of = (len(run.tokens), len(block) // len(run.tokens)), torch.arange(at, at + len(block))
            at += len(block)
            host = (done[of] == count).view(shape)
            run.report.add(accepted_steps=int(done[of].sum()))
            yield self.real.finish(rows, of).view(*shape, -1), copied(host, path.device), host
