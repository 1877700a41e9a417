"""The record of a model family: what the runs of a batch, nodes and the command line ask of its models.

A family is found by its name, which its models carry as ``family``; nothing outside asks for the class of a model. The
three kinds of families are in ``mar.py``, ``tokens.py`` and ``blocks.py`` beside this file. How images are drawn is
not here: samplers are functions of plan, look and draw (``engine.py``), listed in ``registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...samplers.conditioning import AnyCondition
from ...samplers.editing import Edit
from ...samplers.noise import PairedNoise


@dataclass(frozen=True)
class Family(ABC):
    """A model family. The defaults are those of a family whose samplers draw latents from paired noise."""

    # For ``loading.py``, loaders and the command line, which find its files.
    name: str
    words: str  # its models in messages
    reads: tuple[str, ...] = ()  # kinds of conditions that its models draw, see ``conditioning``
    files: str = ""  # family of its files in the catalogue
    demo: tuple[str, ...] = ()  # catalogue entries that "demo" means, the preferred one first; () if there is no demo
    decoder: ClassVar[str] = "kl"  # family of the files of its decoders

    # For a command that names no sampler.
    usual_samplers: tuple[str, ...] = ()
    drafted_samplers: tuple[str, ...] = ()  # further ones with a draft model

    # For nodes and pipeline, which join models, samplers, edits and decoders; the unit also for progress bars.
    kind: ClassVar[str]  # families of one kind have the same samplers
    codes: ClassVar[bool] = False  # whether its samplers draw codes, which the decoder turns into latents
    unit: ClassVar[str] = "steps"  # what a step of its samplers is

    # Words of messages: about a sampler of another kind, and about a missing draft.
    nature: ClassVar[str] = ""  # what is behind the name of one of its models
    small_draft: ClassVar[str] = "a small draft model"  # what its samplers draft with

    # ---------------------------------------------------------------- for runs: batches.py and nodes/running.py

    def noise(self, seed: int, images: Sequence[int]) -> Any:
        """Random numbers of some images of a seed."""
        return PairedNoise(seed, images)

    def short(self, settings: Any) -> Any:
        """Settings of a warm-up: as short as they can be."""
        return settings

    # ---------------------------------------------------------------- for the checks before a run: memory, device, edit

    def complete(self, model: Any, settings: Any) -> Any:
        """The settings with the model's own values where a memory estimate needs them."""
        return settings

    def memory(self, model: Any, condition: AnyCondition, settings: Any, **more: Any) -> dict[str, int]:
        """Bytes of a run by stage, see ``runs/memory/__init__.py``.

        ``more``: whether part of an image is ``edited``, LazyMAR's ``cache`` settings, the ``draft`` model; where they
        are used.
        """
        return {}

    def step_numbers(self, model: Any, settings: Any) -> int:
        """Random numbers of an image in one diffusion step; 0 for families without diffusion."""
        return 0

    def expect_device(self, model: Any, device: torch.device, settings: Any) -> None:  # noqa: B027 (most can)
        """Check that a device can draw with a model."""

    def expect_edit(self, model: Any, edit: Edit, settings: Any, images: int) -> None:
        """Check an edit of some images before anything is loaded or computed."""
        edit.token_mask(self.grid(model, settings), images, edit.start.device)

    # ---------------------------------------------------------------- for decoders, maps and images to start from

    @abstractmethod
    def grid(self, model: Any, settings: Any = None) -> tuple[int, int]:
        """Tokens down and across an image; settings None: of the usual size."""

    def latents(self, model: Any, settings: Any = None) -> tuple[int, int]:
        """Height and width of the decoder's latents of an image."""
        return self.grid(model, settings)

    def sizes(self, model: Any, stride: int) -> tuple[tuple[int, int], ...]:
        """Height and width in pixels of the images that a model draws, the usual one first; ``stride`` is the pixels
        along a side of a decoder's latent.
        """
        height, width = self.latents(model)
        return ((height * stride, width * stride),)

    # ---------------------------------------------------------------- for widgets and presets: the numbers they show

    def own_values(self, model: Any, settings: Any) -> dict[str, Any]:
        """What a model takes where a setting is None, by name; some depend on the number of diffusion steps."""
        return {}

    def width(self, model: Any) -> int:
        """What papers give values by: the width of a MAR's transformer; 0 elsewhere."""
        return 0
