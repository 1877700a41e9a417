"""A run of a sampler: what decides its images, the checks before it, its memory, its steps, and their decoding.

Nodes, command line and Python make a :class:`Drawing` and show its steps each in their own way.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import not_finite
from ..memory import enough_memory
from ..networks.autoencoder import TOO_LITTLE_TO_DECODE, KLModel, VQModel, decode_in_chunks, images_of_a_pass, to_pixels
from ..networks.precision import is_finite
from ..networks.torch_state import in_own_state
from ..reports.record import Clock, Report
from ..samplers.conditioning import AnyCondition
from ..samplers.editing import Edit
from ..samplers.engine import Sampler, Step
from ..samplers.mar.lazy import lazy_transformer
from ..samplers.mar.lazy.settings import CacheSettings
from ..samplers.tokens.mulosd.drafting import UpSampling
from .batches import expect_little_noise, in_parts, run_beginning
from .families import Family
from .loading import Ready
from .memory import DECODE, WEIGHTS
from .registry import Entry, family_of


@dataclass(frozen=True)
class Drawing:
    """A run of a sampler on a model. The same fields give the same images."""

    entry: Entry
    model: Any
    settings: Any
    condition: AnyCondition
    seed: int
    numbers: Sequence[int]  # of the images, which their noise depends on: an image is the same alone or in a batch
    edit: Edit | None = None  # the part of an image to sample again
    draft: Any = None  # a second model
    up_sampler: UpSampling | None = None  # enlarges the codes of the draft
    cache: CacheSettings | None = None  # of LazyMAR, beside a sampler that takes it

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.condition)

    @property
    def family(self) -> Family:
        """That of the model."""
        return family_of(self.model)

    def check(self, device: torch.device, field: str) -> None:
        """Check before anything is loaded or computed that the sampler can run; ``field``: the input that names the
        number of images.

        Raises:
            UserError: settings or an edit that do not fit the model, too many images, or a device that cannot draw.
        """
        self.entry.check(self.model, self.settings)
        expect_little_noise(self.model, self.settings, self.images, field)
        self.family.expect_device(self.model, device, self.settings)
        if self.edit is not None:
            self.family.expect_edit(self.model, self.edit, self.settings, self.images)

    def memory(self) -> dict[str, int]:
        """Bytes of the run by stage, see ``runs/memory/__init__.py``."""
        more = {"edited": self.edit is not None, "cache": self.cache, "draft": self.draft}
        return self.family.memory(self.model, self.condition, self.settings, **more)

    def working(self) -> int:
        """Bytes of the run beside the weights; the stages' are added, because allocators reuse little between them."""
        return sum(count for name, count in self.memory().items() if not name.startswith(WEIGHTS))

    def short(self) -> Drawing:
        """The same with as little work as the sampler can do."""
        return replace(self, settings=self.family.short(self.settings))

    def steps(self, warm: bool = False) -> Generator[Step, None, Any]:
        """Draw all images, in parts if memory is insufficient for all at once: see :func:`.batches.in_parts`."""

        def estimate(part: Sequence[int]) -> dict[str, int]:
            return self._of(part).memory()

        return in_parts(self.begin, self.images, self.model.net, warm, estimate)

    def _of(self, part: Sequence[int]) -> Drawing:
        """The same of some of the images."""
        edit = None if self.edit is None else self.edit.for_images(part, self.images)
        numbers = [self.numbers[i] for i in part]
        return replace(self, condition=self.condition.for_images(part), numbers=numbers, edit=edit)

    def begin(self, part: Sequence[int]) -> Sampler:
        """Begin the sampler on some of the images, by their place in the batch."""
        some = self._of(part)
        more: dict[str, Any] = {}
        if some.edit is not None:
            more["edit"] = some.edit
        if some.draft is not None:
            more["draft"] = some.draft
        if some.up_sampler is not None:
            more["up_sampler"] = some.up_sampler
        if some.cache is not None:
            more |= dict.fromkeys(some.entry.caches, partial(lazy_transformer, settings=some.cache))

        noise = some.family.noise(some.seed, some.numbers)
        return some.entry.run(some.model, some.condition, some.settings, noise, **more)

    def warm_up(self) -> None:
        """Run three short steps, untimed: the first calls in a process initialise libraries."""
        run_beginning(self.short().steps())


@in_own_state
@torch.no_grad()
def decode(ready: Ready, result: Any) -> Tensor:
    """Decode a sampler's result to images uint8 [B, H, W, 3] on the CPU.

    The decoder's seconds and passes enter the report.

    Raises:
        UserError: latents or pixels that are not finite, see :func:`.errors.not_finite`, or insufficient memory.
    """
    decoder = cast(VQModel, ready.decoder)
    report: Report = result.report
    latents = decoder.net.vectors(result.latents) if ready.kind.codes else result.latents
    if not is_finite(latents):
        raise not_finite("model", ready.model.name, "latents")

    clock = Clock(latents.device)
    scratch = Report("", "", {}, None, len(latents), latents.device.type)
    if isinstance(ready.decoder, KLModel):
        net = ready.decoder.net
        count, _, height, width = latents.shape
        batch = min(count, images_of_a_pass(net))
        kept = (count - batch) * net.image_bytes(height, width)  # of the passes before
        report.memory[DECODE] = net.decode_bytes(batch, height, width) + kept

    with enough_memory(TOO_LITTLE_TO_DECODE):
        with clock.phase("decoder"):
            parts = decode_in_chunks(decoder.net, latents)

        clock.stop(scratch)
        report.phases["decoder"] = scratch.phases["decoder"]
        report.add(decoder_passes=len(parts))
        return to_pixels(parts, decoder.name)
