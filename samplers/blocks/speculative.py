"""Speculation in the diffusion of a block: several steps are verified in one evaluation of the head. Lossless.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts:

1. at state x_k the next L steps are drafted with the last prediction, without the head;
2. the head is evaluated at all L states of all images in one batch;
3. the longest accepted prefix is kept, and the first rejected step is replaced by the coupling
   (:func:`..mar.coupling.reflect`).

Step k of the head is N(a_k x_k + b_k p(x_k), s_k^2). Its draft is a sample of N(a_k x_k + b_k p, s_k^2) with an earlier
prediction p, and the coupling turns it into a sample of the head's own step, given x_k. A block is accepted as a whole,
because the head reads all its tokens. Later drafts are used only if this one was accepted, so their states are valid.
Noise and uniforms of discarded steps did not affect any accepted step and are used again, which keeps images of one
seed alike.

Given tokens of a block follow their own path. Drafts have the same, so these tokens have no part in the coupling.

The host keeps the number of evaluations that every image has done, as an array, and reads from the device once a
window: the accepted steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ...reports.record import Report
from ..driver import to_device
from ..mar.coupling import Gaussian, reflect
from ..mar.speculative import places
from ..noise import CounterRNG
from .diffusion import Denoiser, Known, Table, guided

# Lane of an image's uniforms for all acceptances.
_ACCEPT = -1


class Paths:
    """A block of B images in the middle of its diffusion, each at its own evaluation; with its random numbers.

    Methods take the numbers of images, int64 [R] on the host. A state is fp32 [P, C], and a step acts on all numbers of
    it alike.
    """

    done: np.ndarray  # evaluations done, int64 [B]
    x: Tensor  # states fp32 [B, P, C]
    prediction: Tensor  # the last ones, fp32 [B, P, C]; drafts are made from them

    def __init__(
        self,
        denoiser: Denoiser,
        steps: Table,
        start: Tensor,
        noise: Tensor,
        rng: CounterRNG,
        cfg: float,
        branches: int,
        known: Known | None = None,
    ):
        """``rng``: of B images; the other arguments are those of :func:`.diffuse`."""
        self.denoiser = denoiser
        self.cfg = cfg
        self.branches = branches
        self.known = known
        self.device = start.device
        self.last = len(steps.steps)  # the number of the last evaluation
        self._reflect = denoiser.net.region(reflect, "verification of speculation")

        # The first draft uses a prediction of 0, the middle of the data; a rejected draft costs no further call.
        self.done = np.zeros(len(start), np.int64)
        self.x = start.clone()
        self.prediction = torch.zeros_like(start)

        # No step follows the last evaluation. A step without a prediction stands for it: its draft is always accepted,
        # and its result is not used.
        self._steps = to_device(torch.tensor([*steps.steps, (1.0, 0.0, 1.0)]), self.device)
        self._times = to_device(torch.tensor(steps.times), self.device)

        # Of N steps, step k takes entry k T // N of the noise.
        self._start = start
        self._noise = noise
        step = torch.arange(self.last + 1, device=self.device).clamp(max=self.last - 1)
        self._entry = step * len(noise) // self.last
        self._uniforms = rng.uniform(_ACCEPT, 0, self.last + 1)

    def widths(self, images: np.ndarray, most: int) -> np.ndarray:
        """How many states of images the next window has, ``most`` at a time, int64 [R]."""
        return np.minimum(self.last + 1 - self.done[images], most)

    def draft(self, images: np.ndarray, window: int) -> tuple[Tensor, Tensor]:
        """Draft the next W steps of images from their last prediction.

        Returns the states from which they start, the current ones first, and the drafted next states, fp32
        [R, W, P, C] each. An image with fewer evaluations left repeats its last one, which is not used.
        """
        self.denoiser.net.runs_plain("drafts of speculation")
        width = int(self.widths(images, window).max())
        image, done = self._on_device(images, self.done[images])
        step = (done[:, None] + torch.arange(width, device=self.device)).clamp(max=self.last)

        # 1. Everything but the state is known beforehand: x_{k+1} = a_k x_k + fixed_k.
        a, b, s = self._numbers(step)
        fixed = b * self.prediction[image][:, None] + s * self._noise[self._entry[step], image[:, None]]

        # 2. The states, one after another.
        states = []
        drafts = []
        x = self.x[image]
        for k, a_k, fixed_k in zip(step.unbind(1), a.unbind(1), fixed.unbind(1), strict=True):
            x = self._with_known(image, k, x)
            states.append(x)
            x = torch.addcmul(fixed_k, a_k, x)
            drafts.append(x)

        return torch.stack(states, 1), torch.stack(drafts, 1)

    def verify(self, images: np.ndarray, states: Tensor, drafts: Tensor) -> np.ndarray:
        """Evaluate the head at all states of images; advance them past the accepted prefix and one step more.

        ``states`` and ``drafts`` are as :meth:`draft` returns them, from the images' present evaluations on. Returns
        the number of accepted steps, int64 [R].
        """
        # 1. The M states, those of the first image first.
        widths = self.widths(images, states.shape[1])
        firsts, index, columns = places(widths)
        of, column, owner, step = self._on_device(index, columns, images[index], self.done[images][index] + columns)
        image, first, width = self._on_device(images, firsts, widths)

        # 2. The head at all of them. What it predicts for given tokens is not used, so it counts as the draft's.
        x = states[of, column]
        prediction = self._predict(owner, step, x)
        previous = self.prediction[owner]
        target = prediction
        if self.known is not None:
            target = torch.where(self.known.again[owner], prediction, previous)

        # 3. The coupling accepts drafts or replaces them. Of each image the accepted prefix is used, and the first
        # rejected step.
        a, b, s = self._numbers(step)
        mean = (a * x + b * previous).flatten(1)
        p = Gaussian((a * x + b * target).flatten(1), s.log().flatten(1))
        coupled = self._reflect(drafts[of, column].flatten(1), mean, p, self._uniforms[owner, step])
        ok = torch.zeros(states.shape[:2], dtype=torch.int64, device=self.device)
        ok[of, column] = coupled.accepted.to(torch.int64)
        accepted = ok.cumprod(1).sum(1)
        newest = first + torch.minimum(accepted, width - 1)

        # 4. The only read.
        kept = np.minimum(accepted.cpu().numpy(), self.last - self.done[images])

        # 5. Advance.
        self.x[image] = coupled.value[newest].unflatten(1, self.x.shape[1:])
        self.prediction[image] = prediction[newest]
        self.done[images] += np.minimum(kept + 1, widths)
        return kept

    def _predict(self, image: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Predictions with guidance fp32 [M, P, C] at states x fp32 [M, P, C] of images at evaluations k."""
        rows = torch.cat([image + branch * len(self.x) for branch in range(self.branches)])
        predictions = self.denoiser.at(rows, k.repeat(self.branches), x.repeat(self.branches, 1, 1))
        return guided(predictions, self.cfg, self.branches)

    def _with_known(self, image: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """States x [R, P, C] of images at evaluations k, with their given tokens."""
        if self.known is None:
            return x

        known = Known(self.known.tokens[image], self.known.again[image])
        return known.follow(x, self._start[image], self._times[k, None, None])

    def _numbers(self, step: Tensor) -> tuple[Tensor, ...]:
        """The numbers a, b and s of steps [...], fp32 [..., 1, 1] each."""
        return self._steps[step][..., None, None].unbind(-3)

    def _on_device(self, *numbers: np.ndarray) -> Tensor:
        """Arrays of numbers, int64 [R] each, in one copy."""
        return to_device(np.stack(numbers), self.device)


def speculate(paths: Paths, window: int, report: Report) -> Iterator[tuple[int, Tensor]]:
    """Denoise a block, drafting ``window`` steps at once; the report counts drafted and accepted steps.

    Yields, like :func:`.diffuse`, after every window: the evaluations that every image has done, and the newest
    predictions fp32 [B, P, C].
    """
    going = np.arange(len(paths.done))
    while len(going):
        drafted = np.minimum(paths.widths(going, window), paths.last - paths.done[going])
        kept = paths.verify(going, *paths.draft(going, window))
        report.add(drafted_steps=int(drafted.sum()), accepted_steps=int(kept.sum()))
        yield int(paths.done.min()), paths.prediction

        going = going[paths.done[going] <= paths.last]
