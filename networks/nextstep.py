"""NextStep-1 with the official parameter names: a language model that samples one continuous token of an image after
another, and the autoencoder of its tokens.

Source: "NextStep-1: Toward Autoregressive Image Generation with Continuous Tokens at Scale" (arXiv 2508.10711) and its
published code. The language model is Qwen2.5. A token is a patch of p x p latents of C channels: T = C p p numbers. The
tokens follow the prompt in raster order, with the same 1-D RoPE and the same KV cache. A linear layer turns a token
into a row. The hidden row of the newest token is the condition of a small network like MAR's diffusion head, which
samples the next token by flow matching.

Parameters have the names of Qwen2.5, but without ``model.`` in front. The output layer for words is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError, not_finite
from .autoencoder import KLAutoencoder, KLConfig
from .chat import checked, expect_text
from .llama import EMBEDDING, Cache, Llama, LlamaConfig, Positions
from .mar import DiffusionHead
from .ops import FAST, Operations
from .precision import is_finite
from .structure import depth, without
from .torch_state import in_own_state

# Prefix of the names of a Qwen2.5, which NextStep's names lack.
TRUNK = "model."
HEAD = "image_head.net."
# Epsilon of the norms of tokens and of latents, which have no weights.
EPS = 1e-6
# The most token ids of a prompt, without the tokens of an image in it.
MOST_IDS = 1024
# Tokens of the largest images that the published models were trained for: 512 x 512 pixels.
MOST_TOKENS = 1024
# Tokens along a side of these images, and of the images of a model for 256 x 256 pixels.
SIDE = 32
SMALL_SIDE = 16
# Height and width in tokens of the trained shapes at 256 x 256 pixels, the longer side last; both orders are trained.
SHAPES = ((16, 16), (15, 17), (14, 18), (13, 19), (12, 21), (11, 23), (10, 25), (9, 28), (8, 32))
# The authors' negative text for editing.
COPY = "Copy original image."
# Patterns in the names of models: of the model that was trained to edit, of models that were not, of the first
# generation, whose programs generate squares only, and of models for 256 x 256 pixels. Nothing else in a file tells.
_EDITS = re.compile(r"(?<![a-z])edit(?![a-z])", re.IGNORECASE)
_ONLY_DRAWS = re.compile(r"next-?step-?1(?!\d)", re.IGNORECASE)
_FIRST = re.compile(r"next-?step-?1-large", re.IGNORECASE)
_SMALL = re.compile(r"256[-_ ]?px", re.IGNORECASE)
EDITOR = "NextStep-1-Large-Edit"


def edits(name: str) -> bool | None:
    """Whether a model of this name was trained to edit an image; None if the name does not tell."""
    if _EDITS.search(name):
        return True
    return False if _ONLY_DRAWS.search(name) else None


def side_of(name: str) -> int:
    """Tokens along a side of the images that a model of this name was trained for."""
    return SMALL_SIDE if _SMALL.search(name) else SIDE


# ------------------------------------------------------------------------------------------------ tokens


def to_tokens(latents: Tensor, patch: int) -> Tensor:
    """Tokens [B, L, C p p] of latents [B, C, h, w]: patches of p x p latents in raster order.

    The numbers of a token are ordered by channel, then by row and column within the patch.
    """
    return F.pixel_unshuffle(latents, patch).flatten(2).transpose(1, 2)


def to_latents(tokens: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The inverse of :func:`to_tokens`: latents [B, C, h, w] from tokens [B, L, C p p] on a grid (height, width)."""
    return F.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, grid), patch)


def normed(tokens: Tensor) -> Tensor:
    """Normalise the T numbers of each token, [..., T], to mean 0 and variance 1."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=EPS)


# ------------------------------------------------------------------------------------------------ network


@dataclass(frozen=True)
class NextStepConfig(LlamaConfig):
    """Shape of a NextStep."""

    token: int = 0  # numbers T of a token
    patch: int = 2  # latents along a side of a token
    head_width: int = 0  # width of the flow-matching head
    head_depth: int = 0  # residual blocks of the flow-matching head

    @property
    def channels(self) -> int:
        """Channels C of the latents."""
        return self.token // self.patch**2

    @staticmethod
    def of_nextstep(state: Mapping[str, Tensor], patch: int = 2, **numbers: Any) -> NextStepConfig:
        """Derive the shape from official parameter names; ``numbers`` and errors: see :meth:`.LlamaConfig.of_qwen`.

        Raises:
            ValueError: also if a token is not a patch of ``patch`` x ``patch`` latents.
        """
        language = LlamaConfig.of_qwen(trunk_of(state), **{"tied": True, **numbers})
        width, token = state[f"{HEAD}input_proj.weight"].shape
        if token % patch**2:
            raise ValueError(
                f"its tokens have {token} numbers, but {patch} x {patch} latents need a multiple of {patch**2}"
            )

        return NextStepConfig(
            **vars(language),
            token=token,
            patch=patch,
            head_width=width,
            head_depth=depth(state, f"{HEAD}res_blocks."),
        )


def trunk_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the language model under the names of Qwen2.5."""
    found = {f"{TRUNK}{name}": tensor for name, tensor in state.items() if name.startswith("layers.")}
    found[EMBEDDING] = state[EMBEDDING.removeprefix(TRUNK)]
    return found


class FlowHead(DiffusionHead):
    """The velocity of a token: MAR's denoiser without variances, whose times are 0 (noise) to 1 (token).

    With x_t = t x + (1 - t) e of a token x and noise e, it predicts x - e.
    """

    def __init__(self, channels: int, width: int, depth: int, z_channels: int):
        super().__init__(channels, width, depth, z_channels, FAST)
        self.final_layer.linear = FAST.Linear(width, channels)

    def times(self, t: Tensor) -> Tensor:
        """Embeddings [N, w] of times fp32 [N] in 0..1."""
        return self.time_embed(t)


class NextStep(Llama):
    """The language model, the projections of tokens and of conditions, and the flow-matching head."""

    config: NextStepConfig

    def __init__(self, config: NextStepConfig, operations: Operations = FAST):
        super().__init__(config, operations)
        c = config
        self.image_in_projector = operations.Linear(c.token, c.dim)
        self.image_out_projector = operations.Linear(c.dim, c.dim)
        # The head has plain layers, which stay on the device, because it runs once for every diffusion step.
        self.image_head = nn.ModuleDict({"net": FlowHead(c.token, c.head_width, c.head_depth, c.dim)})

    @staticmethod
    def official_name(name: str) -> str:
        """The name of a parameter in the authors' files."""
        return Llama.official_name(name).removeprefix(TRUNK)

    @property
    def head(self) -> FlowHead:
        """The flow-matching head."""
        return cast(FlowHead, self.image_head["net"])

    @property
    def channels(self) -> int:
        """Numbers T of a token."""
        return self.config.token

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., D] of tokens fp32 [..., T]."""
        return self.image_in_projector(tokens.to(self.norm.weight.dtype))

    def begin(self, prefix: Tensor, lengths: Tensor | None, tokens: int) -> tuple[Tensor, Cache]:
        """Feed the prefix, with causal attention.

        Args:
            prefix: rows [R, n, D], padded on the right.
            lengths: int64 [R], the valid rows of each prefix; None: all.
            tokens: number of image tokens for which the cache gets room.

        Returns the conditions [R, 1, D] of the first token, and the cache.
        """
        n = prefix.shape[1]
        table = self.rope(torch.arange(n + tokens, device=prefix.device))
        positions = Positions(table=table, offset=n if lengths is None else lengths[:, None])
        hidden, cache = self.prefill(prefix, 0, tokens, lengths, positions=positions)
        return self.conditions(hidden), cache

    def advance(self, tokens: Tensor, at: int, cache: Cache) -> Tensor:
        """Feed the tokens ``at`` to ``at + n - 1``, fp32 [R, n, T]. Returns the conditions of the next token, [R, 1,
        D].
        """
        n = tokens.shape[1]
        place = torch.arange(at, at + n, device=tokens.device)
        slot = cache.prefix + place
        end = cache.prefix + at + n
        mask = None if n == 1 else torch.arange(end, device=tokens.device) <= slot[:, None]
        return self.conditions(self.feed(self.embed(tokens), place, slot, cache, end, mask)[:, -1:])

    def conditions(self, hidden: Tensor) -> Tensor:
        """Conditions [..., D] for the head, of hidden rows [..., D]."""
        return self.image_out_projector(self.norm(hidden))


# ------------------------------------------------------------------------------------------------ autoencoder


@dataclass(frozen=True)
class LatentConfig(KLConfig):
    """Shape of the autoencoder, Flux's form, and what its configuration states about latents."""

    mixes: bool = False
    scaling: float = 1.0  # latents = (mean - shift) * scaling
    shift: float = 0.0
    norm_patch: int = 0  # the mean is normalised over patches of this many positions along a side; 0 for no norm


class NextStepAutoencoder(KLAutoencoder):
    """Images and the latents of which tokens are made: normalised, shifted and scaled."""

    config: LatentConfig

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of latents, [B, C, h, w] each, of images [B, 3, H, W] in -1..1. Only the mean is normalised."""
        c = self.config
        mean, std = super().encode(x)
        if c.norm_patch:
            patches = F.pixel_unshuffle(mean, c.norm_patch).movedim(1, -1)
            mean = F.pixel_shuffle(normed(patches).movedim(-1, 1), c.norm_patch)
        return (mean - c.shift) * c.scaling, std * c.scaling

    def decode(self, z: Tensor) -> Tensor:
        """Images [B, 3, h * stride, w * stride] of latents [B, C, h, w], as :meth:`.KLAutoencoder.decode`."""
        return super().decode(z / self.config.scaling + self.config.shift)


class ReadSource(NamedTuple):
    """An image to change, in the form that a NextStep reads."""

    tokens: Tensor  # fp32 [S, T], in raster order
    grid: tuple[int, int]  # tokens down and across


@dataclass(frozen=True, eq=False)
class SourceReader:
    """What reads images for a NextStep: the autoencoder of its tokens."""

    net: NextStepAutoencoder
    name: str
    patch: int  # latents along a side of a token
    side: int  # pixels along a side of the square that an image is cut to

    @in_own_state
    @torch.no_grad()
    def read(self, image: Tensor) -> ReadSource:
        """The tokens of an image, from the mean of its latents. Images are read one at a time, so the tokens do not
        depend on a batch.

        ``image``: uint8 [H, W, 3], whose sides are multiples of the pixels along a side of a token.

        Raises:
            UserError: latents that are not finite.
        """
        weight = next(self.net.parameters())
        pixels = (image.float() / 255 - 0.5) / 0.5
        latents, _ = self.net.encode(pixels.movedim(-1, 0)[None].to(weight.device, weight.dtype))
        if not is_finite(latents):
            raise not_finite("model", self.name, "latents of the image")

        _, _, height, width = latents.shape
        tokens = to_tokens(latents.float(), self.patch)[0]
        return ReadSource(tokens, (height // self.patch, width // self.patch))


# ------------------------------------------------------------------------------------------------ models


class Rows(NamedTuple):
    """What stands before the first token in each branch: R rows of ids, and the images in these rows."""

    ids: list[list[int]]
    # For each row the image in it, whose tokens replace the placeholders among the ids; None: no image.
    sources: list[ReadSource | None]


@dataclass(frozen=True)
class Marks:
    """Ids of the special tokens around an image."""

    area: int  # stands before the height and width of an image
    begin: int  # begins the image; its hidden row is the condition of token 0
    end: int  # ends an image in a prompt
    place: int  # placeholder for a token of an image in a prompt
    text: int | None = None  # begins every row, if the tokenizer has such a token


@dataclass(frozen=True, eq=False)
class NextStepModel:
    """A NextStep with the metadata of its files."""

    net: NextStep  # the network in eval mode
    name: str  # display name for messages and reports
    stride: int  # pixels along a side of a token
    tokenize: Callable[[str], list[int]]  # text to ids, without special tokens
    marks: Marks
    side: int = SIDE  # tokens along a side of the images that it was trained for
    note: str = ""  # what decides the result without being stated by user or file

    family: ClassVar[str] = "nextstep"  # see runs/families/__init__.py
    condition: ClassVar[str] = "prompt"
    label_set: ClassVar[str] = ""
    reads_images: ClassVar[bool] = True
    lacks_reader: ClassVar[bool] = False
    editor: ClassVar[str] = EDITOR

    @property
    def edits(self) -> bool | None:
        """See :func:`edits`."""
        return edits(self.name)

    @property
    def is_first(self) -> bool:
        """Whether it is a NextStep-1, not a NextStep-1.1, as far as its name tells."""
        return _FIRST.search(self.name) is not None

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"transformer": without(self.net, self.net.image_head), "head": self.net.image_head}

    @property
    def device(self) -> torch.device:
        """Device on which it computes."""
        return self.net.compute_device

    # ---------------------------------------------------------------- sizes

    @property
    def usual_size(self) -> tuple[int, int]:
        """Height and width in pixels of an image whose size is not set."""
        return self.side * self.stride, self.side * self.stride

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width in pixels of the images that it was trained for, the usual size first."""
        if self.side % SMALL_SIDE or self.is_first:
            return (self.usual_size,)

        unit = self.side // SMALL_SIDE * self.stride
        both: dict[tuple[int, int], None] = {}  # in the order of the list, squares once
        for one, other in SHAPES:
            both[one * unit, other * unit] = None
            both[other * unit, one * unit] = None
        return tuple(both)

    def grid(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Tokens (height, width) of an image with this many pixels; None: the usual height or width.

        Raises:
            UserError: a size that is not a multiple of a token's size, or larger than the sizes of the training.
        """
        usual = self.usual_size
        height = usual[0] if height is None else height
        width = usual[1] if width is None else width
        trained = ", ".join(f"{w} x {h}" for h, w in self.sizes)
        unit = self.stride
        if height % unit or width % unit or min(height, width) < unit:
            raise UserError(
                f"width: {width} x {height} cannot be divided into tokens of {unit} x {unit} pixels; choose multiples "
                f"of {unit}. {self.name} was trained for {trained}."
            )

        tokens = height * width // unit**2
        if tokens > MOST_TOKENS:
            raise UserError(
                f"width: {width} x {height} has {tokens} tokens, but {self.name} generates at most {MOST_TOKENS}; "
                f"choose a size that it was trained for: {trained}."
            )
        return height // unit, width // unit

    # ---------------------------------------------------------------- prompts

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt as typed; names of special tokens in it are plain text.

        Raises:
            UserError: the text is too long, or encoded outside the vocabulary.
        """
        return self._ids(text, "text")

    image_prompt = prompt

    def instruction(self, text: Any) -> list[int]:
        """Token ids of a negative text; raises the errors of :meth:`prompt`."""
        return self._ids(text, "negative")

    def _ids(self, text: Any, field: str) -> list[int]:
        expect_text(text, field)
        return checked(self.tokenize(text), self.net.config.vocab, MOST_IDS, self.name, field)

    def row(self, ids: Sequence[int], grid: tuple[int, int], source: tuple[int, int] | None = None) -> list[int]:
        """Token ids of a whole row before the first token of an image of ``grid``.

        Args:
            ids: token ids of the text.
            grid: tokens (height, width) of the image to generate.
            source: tokens (height, width) of the image to change, which stands before the text; None: there is none.
        """
        m = self.marks
        before = [] if source is None else [*self._area(source), *[m.place] * (source[0] * source[1]), m.end]
        if m.text is None:
            return [*before, *ids, *self._area(grid)]

        # The published code removes the first id of the area, as if the tokenizer had begun the area with ``text``
        # again.
        return [m.text, *before, *ids, *self._area(grid)[1:]]

    def _area(self, grid: tuple[int, int]) -> list[int]:
        """Token ids that state the size of an image and begin the image."""
        height, width = grid
        return [self.marks.area, *self.tokenize(f"{height}*{width}"), self.marks.begin]

    def prefix(self, rows: Rows, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Embed rows: the prefix [R, n, D], padded on the right; and the lengths of the rows, int64 [R], or None if all
        lengths are equal.

        Args:
            rows: see :class:`Rows`.
            tokens: number of image tokens after each row.

        Raises:
            UserError: the image does not fit after a row.
        """
        counts = [len(ids) for ids in rows.ids]
        longest = max(counts)
        room = self.net.config.positions
        if longest + tokens > room:
            raise UserError(
                f"width: {tokens} image tokens after a prompt of {longest} tokens exceed the {room} positions of "
                f"{self.name}; choose a smaller size or a shorter prompt."
            )

        device = self.device
        padded = torch.tensor([[*ids, *[ids[-1]] * (longest - len(ids))] for ids in rows.ids], device=device)
        embedded = self.net.tok_embeddings(padded)
        for i, source in enumerate(rows.sources):
            if source is not None:
                embedded[i, padded[i] == self.marks.place] = self.net.embed(source.tokens.to(device))
        lengths = None if min(counts) == longest else torch.tensor(counts, device=device)
        return embedded, lengths
