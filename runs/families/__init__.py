"""The records of model families, all that loading, runs, nodes and command line ask of models; and of samplers.

A family is found by its name, which its models carry as ``family``; nothing outside asks for the class of a model, or
for the name of a family. Families of one kind are sampled in one way: ``masked.py`` and ``tokens.py`` have what the
families of a kind share, and a file each the record of a family. How images are drawn is not here: samplers are
functions of plan, look and draw (``engine.py``), listed in ``registry.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.autoencoders.loader import load_kl
from ...model_loaders.catalogue import hub
from ...model_loaders.catalogue.official import NETWORKS
from ...model_loaders.files.wrappers import AUTO
from ...networks.ops import shapes_only
from ...samplers.conditioning import AnyCondition, CodeCondition, ImagePromptCondition, PromptCondition
from ...samplers.editing import Edit
from ...samplers.engine import Sampler
from ...samplers.noise import PairedNoise
from ...samplers.settings import Settings


@dataclass(frozen=True)
class Family(ABC):
    """A model family. The defaults fit a family whose samplers generate latents from paired noise."""

    # For ``loading.py``, loaders and the command line, which find its files.
    name: str
    words: str  # its models in messages, with an article
    load_file: Callable[..., Any]  # its loader: path, precision, device, and what :meth:`load` passes
    files: str  # the kind of its files, see ``model_loaders/kinds.py``
    reads: tuple[str, ...] = ()  # kinds of conditions that its models draw, see ``conditioning``
    reads_negatives: bool = False  # whether what guidance leads away from is a text, and not a null prompt of theirs
    one_grid: str = ""  # why its loader takes no number of tokens per side; "" if it takes one
    tokenizer: str = ""  # catalogue entry of the tokenizer of files that come without one, which its loader asks for
    demo: tuple[str, ...] = ()  # catalogue entries that "demo" means, the preferred one first; () if there is no demo
    decoder: ClassVar[str] = "kl"  # the kind of files of its decoders
    load_decoder: ClassVar[Callable[..., Any]] = staticmethod(load_kl)  # of such a file

    # For a command that names no sampler.
    usual_samplers: tuple[str, ...] = ()
    drafted_samplers: tuple[str, ...] = ()  # further ones with a draft model
    samplers: tuple[Entry, ...] = ()  # its own samplers

    # For nodes and pipeline, which join models, samplers, edits and decoders; the unit also for progress bars.
    kind: ClassVar[str]  # families of one kind have the same samplers
    codes: ClassVar[bool] = False  # whether its samplers draw codes, which the decoder turns into latents
    unit: ClassVar[str] = "steps"  # what a step of its samplers is
    answers: ClassVar[bool] = False  # whether its models answer questions about images
    takes_freedom: ClassVar[bool] = False  # whether the *freedom* of a condition with an image changes what it draws

    # Sockets and texts of nodes.
    socket: ClassVar[str]  # type of the sockets of its models
    model_help: ClassVar[str] = ""  # "": it names the loaders
    condition_help: ClassVar[str] = "What to generate: one label or prompt per image."
    image_help: ClassVar[str] = ""  # what the help says about the image to change
    mask_help: ClassVar[str] = "The area to regenerate; the rest of the image stays unchanged."

    @property
    def reads_prompts(self) -> bool:
        """Whether its models draw from a prompt, or from the codes of one."""
        return PromptCondition.kind in self.reads or CodeCondition.kind in self.reads

    @property
    def reads_images(self) -> bool:
        """Whether its models read images beside prompts, to change them."""
        return ImagePromptCondition.kind in self.reads

    def further_uses(self, name: str) -> str:
        """What the model of that name does beside drawing, as the end of a phrase."""
        return ""

    # ---------------------------------------------------------------- for loading: files to a model and its decoder

    def load(
        self,
        path: Path,
        precision: Any,
        device: torch.device,
        find: Callable[[str, str], Path],
        grid: int | None = None,
        weights: str = AUTO,
        **about: Any,
    ) -> Any:
        """A model from its file.

        Args:
            path, precision, device: see :func:`.checkpoint.load_strictly`.
            find: (choice, kind of files) to the path of another file that the model needs.
            grid: tokens per side; None takes the file's.
            weights: which weights of a training's file.
            about: further arguments of every loader.
        """
        if not self.one_grid:
            about["grid"] = grid
        if self.tokenizer:
            about["find_tokenizer"] = lambda: find(self.tokenizer, "tokenizer")

        return self.load_file(path, precision, device, weights=weights, **about)

    def network(self, model: Any) -> Any:
        """All networks of a model but its decoder's."""
        return model.net

    def decoder_inside(self, path: Path, device: torch.device, **about: Any) -> Any:
        """The decoder that is in or beside the file of a model; None if there is none."""
        return None

    def latent_channels(self, model: Any) -> int:
        """Channels of the latents that its decoders decode."""
        return int(model.net.config.channels)

    def expect_decoder(self, decoder: Any, model: Any) -> None:
        """Raise a UserError if a decoder is not one for a model's results."""
        makes = self.latent_channels(model)
        reads = decoder.net.config.z_channels
        if makes != reads:
            raise UserError(
                f"decoder: {decoder.name} decodes {reads} latent channels, but {model.name} generates {makes}; choose "
                "auto, or the decoder that the model was trained with."
            )

    def own_reader(self, model: Any, decoder: Any) -> Any:
        """What reads images for a model with the networks of the model and its decoder; None: a part of its file does,
        see ``loading.load_image_reader``. Its ``read`` makes of a :meth:`prepared` image what
        :class:`.ImagePromptCondition` holds.
        """
        return None

    def prepared(self, image: Tensor, reader: Any) -> Tensor:
        """An image uint8 [H, W, 3] of any size as its reader takes it."""
        return image

    def with_note(self, model: Any, note: str) -> Any:
        """A model with a further remark for its reports."""
        return replace(model, note=f"{model.note}; {note}" if model.note else note)

    def published(self, model: Any) -> dict[str, Any]:
        """The published settings of a model, which may be without weights."""
        return {}

    def outlined(self, entry: hub.Entry) -> Any:
        """The model of a catalogue entry that names its network, without weights: what its settings and memory depend
        on.
        """
        raise LookupError(f"{self.words} has no published models")

    def own_samplers(self, model: Any, names: Sequence[str]) -> list[str]:
        """Those of the samplers of its family that a model was trained for."""
        return list(names)

    def samplers_of_file(self, names: Sequence[str]) -> tuple[str, ...]:
        """For a command that names no sampler: those for a file with weights of these names."""
        return self.usual_samplers

    # ---------------------------------------------------------------- for runs: batches.py and nodes/running.py

    def noise(self, seed: int, images: Sequence[int]) -> Any:
        """Random numbers of some images of a seed."""
        return PairedNoise(seed, images)

    def short(self, settings: Any) -> Any:
        """Settings of a warm-up: as short as they can be."""
        return settings

    # ---------------------------------------------------------------- for the checks before a run: memory, device, edit

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

    def expect_draft(  # noqa: B027 (most have no sampler with a draft)
        self, model: Any, draft: Any, tokenizer: Any, of_draft: Any, title: str
    ) -> None:
        """Check that a draft model fits a model; both come with the tokenizers of their codes, None without codes.

        ``title``: of the sampler.
        """

    def classes(self, model: Any) -> int:
        """Number of classes of a model; of another one the channels of a condition row."""
        return int(model.net.config.classes)

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


@dataclass(frozen=True)
class Entry:
    """A sampler."""

    name: str  # its command-line name
    title: str
    # run(model, condition, settings, noise) returns the generator; noise is PairedNoise in the families of latents, and
    # TokenNoise in all other families. All but MuLo-SD also take edit, part of an image to sample again.
    run: Callable[..., Sampler]
    check: Callable[[Any, Any], None]  # check(model, settings) raises what run would of them, before anything runs
    settings: type[Settings]
    families: tuple[str, ...]  # its model families, by name; reports are compared with the reports of the first
    baseline: bool = False  # whether the other samplers of its family are measured against it
    needs_draft: bool = False  # whether run also takes draft, a second model
    needs_up_sampler: bool = False  # whether run also takes up_sampler, which enlarges the codes of a draft (MuLo-SD)
    # The arguments of run that say how a transformer is evaluated; LazyMAR's caches give their own.
    caches: tuple[str, ...] = ()
    demo: tuple[str, ...] = ()  # catalogue entries that "demo" means for it, if not its family's

    @property
    def family(self) -> Family:
        """The first of its families."""
        return families()[self.families[0]]

    @property
    def models(self) -> str:
        """Description of its models in messages."""
        return ", or ".join(families()[family].words for family in self.families)

    @property
    def node(self) -> str:
        """Id of its node, in which saved graphs find it. Combinations have none, and Tar's is LlamaGen's."""
        return f"FastAR{self.title.replace('-', '')}Sampler"

    def demos(self, family: str) -> tuple[str, ...]:
        """What "demo" may mean for it in one of its families."""
        own = self.demo or families()[family].demo
        return own[:1] if self.needs_up_sampler else own  # the smaller one is the draft


def network_of(entry: hub.Entry) -> Any:
    """The network of a catalogue entry without weights."""
    with shapes_only():
        return NETWORKS[entry.network](entry.network)


def token_a_word(text: str) -> list[int]:
    """Token ids of a prompt for a model without a tokenizer: one for each word."""
    return [ord(word[0]) % 256 for word in text.split()]


# The families, each with a module of its name, which has its record. Messages list them in this order.
FAMILIES = (
    "mar",
    "llamagen",
    "tar",
    "hybrid",
    "janus",
    "bitdance",
    "nextstep",
)


@cache
def families() -> dict[str, Family]:
    """The records of all families by name."""
    return {name: import_module(f".{name}", __package__).FAMILY for name in FAMILIES}
