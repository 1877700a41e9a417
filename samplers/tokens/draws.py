"""Paired draws for discrete tokens: one random number for every (seed, image, stream, cell, token value).

The Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample (Gumbel 1954). Two samplers that
share the noise therefore draw the same token where their probabilities are equal, and usually where they are close. The
numbers are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): any cell can be sampled
at any time, on any device, without a table and without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import to_device
from ..noise import GOLDEN, mix_, stream_key
from .settings import TokenSettings

# The step from a cell's numbers to those of the next one: 2^32 of GOLDEN's steps, modulo 2^64.
_CELL = (GOLDEN & 0xFFFFFFFF) << 32
# The largest fp32 number below 1.
_BELOW_ONE = 1 - 2**-24


class CellNoise(NamedTuple):
    """The random numbers of a stream, a function of cell and token value: tensors only, which a recorded function can
    take.
    """

    keys: Tensor  # int64 [B, 1, 1], the counter of every image at cell 0 and value 0
    steps: Tensor  # int64 [V], the steps from there to each value

    def uniform(self, cells: Tensor) -> Tensor:
        """Uniform numbers fp32 [B, n, V] of int64 cells [n], or [B, n] if images differ.

        They are above 0 and below 1, and finest near 0.
        """
        # The counter is cell * 2^32 + value, in steps of GOLDEN; int64 arithmetic wraps around.
        bits = mix_(self.keys + (cells * _CELL)[..., None] + self.steps)
        upper = (bits >> 32).bitwise_and_((1 << 32) - 1)

        # The numbers nearest to 1 would be rounded to it, which makes the Gumbel noise -inf.
        return upper.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)

    def gumbel(self, cells: Tensor) -> Tensor:
        """Gumbel(0, 1) noise fp32 [B, n, V] of int64 cells [n], or [B, n] if images differ."""
        # Large values of the noise, which decide the argmax, are computed from the finest end of the uniform numbers.
        return self.uniform(cells).neg_().log1p_().neg_().log_().neg_()


class PairedDraws:
    """Draws of B images of a seed (0 to 2^64 - 1); ``images`` are image indices, one per batch entry.

    A derived class may take its numbers from elsewhere: :meth:`stream` returns them, in an object with a method
    ``gumbel`` as in :class:`CellNoise`.
    """

    seed: int | None = None  # None: draws from elsewhere, of a class derived from this one

    def __init__(self, seed: int | None, images: Sequence[int]):
        self.seed = seed
        self.images = tuple(images)
        self._streams: dict[tuple[str, int, torch.device], CellNoise] = {}

    def __len__(self) -> int:
        return len(self.images)

    def of(self, images: Sequence[int]) -> PairedDraws:
        """The draws of some of the images, by their place in the batch.

        Raises:
            TypeError: a class with other numbers that has no ``of`` of its own.
        """
        if type(self) is not PairedDraws:
            raise TypeError(f"{type(self).__name__} draws other numbers; define its of(), which keeps some images.")
        return PairedDraws(self.seed, [self.images[i] for i in images])

    def stream(self, name: str, values: int, device: torch.device) -> CellNoise:
        """The noise of a stream for tokens of so many values, on a device; made once per run."""
        key = (name, values, device)

        if key not in self._streams:
            seeds = [stream_key(self.seed, image, name) for image in self.images]
            keys = [int.from_bytes(seed, "little", signed=True) for seed in seeds]
            of_images = to_device(torch.tensor(keys, dtype=torch.int64), device).view(-1, 1, 1)
            of_values = torch.arange(values, dtype=torch.int64, device=device) * GOLDEN
            self._streams[key] = CellNoise(of_images, of_values)
        return self._streams[key]

    def uniform(self, stream: str, cells: Tensor, values: int) -> Tensor:
        """:meth:`CellNoise.uniform` of a stream, on the device of the cells."""
        return self.stream(stream, values, cells.device).uniform(cells)

    def gumbel(self, stream: str, cells: Tensor, values: int) -> Tensor:
        """:meth:`CellNoise.gumbel` of a stream, on the device of the cells."""
        return self.stream(stream, values, cells.device).gumbel(cells)


def allowed(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits fp32 [..., V] with -inf for every value that may not be sampled.

    Top-k keeps the k largest and their ties; 0 keeps all. Top-p (Holtzman et al. 2019) then keeps the smallest set of
    most probable values whose probability exceeds it; 1 keeps all.
    """
    values = logits.shape[-1]
    if 0 < top_k < values:
        least = logits.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)

    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        beyond = ordered.softmax(-1).cumsum(-1) > top_p
        # The value at which the sum crosses top_p stays.
        beyond = torch.cat([torch.zeros_like(beyond[..., :1]), beyond[..., :-1]], dim=-1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return logits


def tempered(logits: Tensor, settings: TokenSettings) -> Tensor:
    """Logits fp32 [..., V] of the sampling distribution: after temperature, top-k, top-p and the factor of
    ``entropy_temperature``.

    At temperature 0 the likeliest value has the whole probability.
    """
    if settings.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, likeliest, 0.0)

    kept = logits if settings.temperature == 1 else logits / max(settings.temperature, 1e-5)
    top_k = 0 if settings.top_k is None else settings.top_k  # the model's own replaced it, see defaults.resolve
    kept = allowed(kept, top_k, settings.top_p)
    if settings.entropy_temperature == 0:
        return kept

    # The entropy of the values that may be sampled, before any temperature.
    untempered = logits.masked_fill(kept.isneginf(), -torch.inf)
    return kept / entropy_factor(untempered, settings.entropy_temperature)


def entropy_factor(logits: Tensor, strength: float) -> Tensor:
    """Factor of the temperature by the entropy of a distribution; fp32 [..., 1] of its logits fp32 [..., V].

    Source: Ma et al. 2025, "Towards Better & Faster Autoregressive Image Generation: From the Perspective of Entropy"
    (NeurIPS 2025, arXiv 2510.09012), equation 2 with LlamaGen's constants: 2.5 exp(-H / 3) + 0.6. Where the published
    code is more definite than the text, this follows the code: H is in nats, of the logits after guidance, top-k and
    top-p and before the temperature, which the factor multiplies. Regions of which the model is certain get more
    randomness (a factor of 3.1 at H 0), uncertain ones less (below 1 from H 5.5 on). At a temperature other than 1
    top-p keeps other values than there, because it follows the temperature here, as in LlamaGen.

    ``strength`` 1 is that factor, 0 is 1 for every distribution, and between them it changes in proportion, which is
    not in the paper. Equal logits have equal factors, whatever else is sampled beside them.
    """
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)

    published = 2.5 * torch.exp(-entropy / 3) + 0.6
    return 1 + strength * (published - 1)


def draw(logits: Tensor, settings: TokenSettings, gumbel: Tensor) -> Tensor:
    """Token values int64 [B, m] from logits fp32 [B, m, V] and Gumbel noise of the same shape, which temperature 0
    ignores.
    """
    if settings.temperature == 0:
        return logits.argmax(-1)
    return (tempered(logits, settings) + gumbel).argmax(-1)


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, CTRL, as in Hugging Face transformers); 1 changes nothing.

    Divides the logits fp32 [..., V] of values that were sampled before (``used``, bool [..., V]) if they are positive,
    and multiplies them otherwise.
    """
    return torch.where(used, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
