"""CSpD's mode ``paper``: the acceptance criterion as the paper derives it. Approximate (see ``cspd.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..noise import CounterRNG, copied
from .coupling import Gaussian
from .cspd_models import Drafted, Segments, exponent, redrawn
from .loop import Conditions, Run
from .speculative import SpeculativeDenoiser


def paper_ratio(path: Tensor, q: Gaussian, p: Gaussian, inner: float = 1.0, exponents: float = 0.0) -> Tensor:
    """log of Sigma p(x_0 | x_1) / q(x_0 | x_1) on one trajectory: equations (4), (5).

    Args:
        path: states fp32 [N, S + 1, channels] of either model.
        q, p: both models' kernels at these states, fp32 [N, S, channels].
        inner: the last step's deviations are multiplied by it.
        exponents: temperature at which the other steps' exponents are counted, as without shared noise; 0 leaves them out.

    Returns:
        fp32 [N].
    """
    last_q, last_p = (Gaussian(g.mean[:, -1], g.log_std[:, -1]) for g in (q, p))
    out = (q.log_std - p.log_std).sum((1, 2))
    out = out + exponent(path[:, -1], last_p, inner) - exponent(path[:, -1], last_q, inner)
    if exponents:
        after, rest_q, rest_p = path[:, 1:-1], *(Gaussian(g.mean[:, :-1], g.log_std[:, :-1]) for g in (q, p))
        out = out + (exponent(after, rest_p, exponents) - exponent(after, rest_q, exponents)).sum(1)
    return out


class Paper(Segments):
    """A draft is accepted by the ratio of both models' densities on the draft's trajectory."""

    def judge(
        self, run: Run, steps: Sequence[int], drafted: Sequence[Drafted], zs: Sequence[Conditions]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [B, n, channels] of AR steps in turn, and which are the draft's, bool [B, n], also on the host."""
        image, position, scale, blocks = self.rows(run, steps)
        path = torch.cat([d.trace.path for d in drafted])
        q = Gaussian(*(torch.cat(x) for x in zip(*(d.trace.kernel for d in drafted), strict=True)))
        z_p, z_q = Conditions.join([z.flat() for z in zs]), Conditions.join([d.z.flat() for d in drafted])
        ratio = self.ratio(path, q, self.kernels(self.real, z_p, scale, path))
        ok = self.draws.guess(image, position).log() <= ratio
        sizes = [len(block) for block in blocks]
        known = ok.cpu().split(sizes)  # the host waits for the device here, and nowhere else
        for block, host in zip(blocks, known, strict=True):
            shape, tokens = (len(run.tokens), len(block) // len(run.tokens)), path[block, -1]
            if not bool(host.all()):
                at = copied((~host).nonzero()[:, 0], block.device)
                bad = block[at]
                new = self.anew(z_p.at(bad), z_q.at(bad), scale[bad], image[bad], position[bad])
                tokens = tokens.index_copy(0, at, new)
            yield tokens.view(*shape, -1), ok[block].view(shape), host.view(shape)

    def ratio(self, path: Tensor, q: Gaussian, p: Gaussian) -> Tensor:
        """log ratio fp32 [N]. Without alignment all exponents count; at temperature 0 there are none."""
        return paper_ratio(path, q, p, self.inner, 0.0 if self.settings.alignment else self.settings.temperature)

    @staticmethod
    def kernels(head: SpeculativeDenoiser, z: Conditions, scale: Tensor, path: Tensor) -> Gaussian:
        """Kernels fp32 [N, S, channels] of a model at the states of paths [N, S + 1, channels], in one head call."""
        n, count, channels = len(path), len(head.table), path.shape[2]
        row = torch.arange(n, device=path.device).repeat_interleave(count)
        step = torch.arange(count, device=path.device).repeat(n)
        x = path[:, :-1].flatten(0, 1)
        rows = head.rows(
            z, scale, path[:, 0], x.new_zeros(0), CounterRNG(row[:0])
        )  # evaluated only: no noise, no random numbers
        mean, log_std = head.learned(step, x, *head.predict(rows, row, step, x))
        return Gaussian(mean.view(n, count, channels), log_std.view(n, count, channels))

    def anew(self, z: Conditions, z_draft: Conditions, scale: Tensor, image: Tensor, position: Tensor) -> Tensor:
        """Tokens fp32 [N, channels] that replace N rejected ones, from max(0, p - q) / Z: equations (7) to (11)."""
        path, p = self.head.trace(z, scale, *self.own_noise(image, position))
        q = self.kernels(self.of_draft, z_draft, scale, path)
        rest = path[:, None, :-1]

        def keep(drawn: Tensor, uniforms: Tensor) -> Tensor:
            count = drawn.shape[1]
            paths = torch.cat([rest.expand(-1, count, -1, -1), drawn[:, :, None]], 2).flatten(0, 1)
            mine, theirs = (Gaussian(*(x.repeat_interleave(count, 0) for x in g)) for g in (q, p))
            return ~(uniforms > 1 - torch.exp(-self.ratio(paths, mine, theirs).view(-1, count)))

        last = Gaussian(p.mean[:, -1], p.log_std[:, -1])
        drawn, found, newest = redrawn(self.draws, image, position, last, keep)
        return torch.where(found[:, None], drawn, newest)
