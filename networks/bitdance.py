"""BitDance with the official parameter names: its two networks, the diffusion head, and the order of the tokens.

Source: "BitDance" (arXiv 2602.14041). An image is a grid of tokens of C bits. A *block* is a square of P tokens. Blocks
follow one another in raster order, and so do the tokens of a block. A transformer reads a condition and the blocks so
far. The rows of a block attend to each other and to everything before the block. Row j of a block is the condition for
token j of the next block. A diffusion head samples all P tokens of a block together. It is a small transformer over the
tokens of a block, or an MLP if blocks have a single token.

- :class:`BitDanceText`: its condition is a prompt, which Qwen3 reads (14B; blocks of 64 or 16 tokens).
- :class:`BitDanceClass`: its condition is a class label of ImageNet (B, L, H; blocks of 1, 4 or 16 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .chat import chat, checked, expect_text
from .llama import CLASS, PROMPT, Block, Cache, Llama, LlamaConfig, Norm, Positions, attend, rope_table
from .mar import TimeEmbedding, modulated
from .ops import FAST, Operations
from .speed import Recordable
from .structure import depth, without

# Attention heads of the ImageNet models by width, which no state dict holds: sizes B, L, H.
OFFICIAL_HEADS = {768: 12, 1024: 16, 1280: 20}
# Width of an attention head in the diffusion head, for prompts and for class labels.
TEXT_HEAD_DIM = 128
CLASS_HEAD_DIM = 64
# The most token ids of a prompt with its template.
MOST_IDS = 1024
# Sizes of an image in pixels, the longer side first; a model also generates the sizes with both sides exchanged. Models
# with blocks of 64 tokens were trained on the first list only.
LARGE_SIZES = ((1024, 1024), (1152, 896), (1280, 768), (1536, 640), (1920, 512), (2048, 512))
SMALL_SIZES = ((512, 512), (640, 384), (896, 256), (1024, 256))


# ------------------------------------------------------------------------------------------------ diffusion head


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a diffusion head."""

    channels: int  # bits C of a token
    condition: int  # width D of a condition row
    width: int  # width W of the head
    depth: int  # residual blocks
    modulations: int  # adaLN layers; consecutive blocks share one
    heads: int  # attention heads; 0 for an MLP on single tokens
    gated: bool = True  # whether the feed-forward parts are SwiGLU
    bounded: bool = False  # whether a tanh bounds the prediction

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], head_dim: int, bounded: bool) -> HeadConfig:
        """Derive the shape from official parameter names, which begin with ``net.``.

        Raises:
            KeyError, ValueError: if the names or shapes are not those of a head.
        """
        width, channels = state["net.input_proj.weight"].shape
        blocks = depth(state, "net.res_blocks.")
        modulations = depth(state, "net.ada_ln_blocks.")
        if not modulations or blocks % modulations:
            raise ValueError(f"its {blocks} blocks cannot share {modulations} modulations")

        attends = "net.res_blocks.0.attn.wqkv.weight" in state
        if attends and width % head_dim:
            raise ValueError(f"its width {width} is no multiple of {head_dim}, the width of an attention head")

        return HeadConfig(
            channels=channels,
            condition=state["net.cond_embed.weight"].shape[1],
            width=width,
            depth=blocks,
            modulations=modulations,
            heads=width // head_dim if attends else 0,
            gated="net.res_blocks.0.w1.weight" in state,
            bounded=bounded,
        )


def silu_gated(halves: Tensor) -> Tensor:
    """silu(a) * b, where a and b are the two halves of each row."""
    a, b = halves.chunk(2, -1)
    return F.silu(a) * b


class SwiGLU(nn.Module):
    """SwiGLU: w2(silu(a) * b), where a and b are the halves of w1(x)."""

    def __init__(self, c_in: int, hidden: int, c_out: int, bias: bool, operations: Operations = FAST):
        super().__init__()
        self.w1 = operations.Linear(c_in, 2 * hidden, bias=bias)
        self.w2 = operations.Linear(hidden, c_out, bias=bias)

    def inner(self, x: Tensor) -> Tensor:
        """The input of w2."""
        return silu_gated(self.w1(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.inner(x))


class _HeadAttention(nn.Module):
    """Self-attention of the tokens of a block, without positions."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.heads = c.heads
        self.wqkv = FAST.Linear(c.width, 3 * c.width)
        self.wo = FAST.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.wo(attend(q, k, v))


class _HeadBlock(nn.Module):
    """A residual block. Its modulation is 1 + scale, shift and gate; a transformer block has these three for both of
    its parts.
    """

    def __init__(self, c: HeadConfig):
        super().__init__()
        hidden = c.width * 3 // 2
        if c.heads:
            self.norm1 = nn.LayerNorm(c.width, eps=1e-6)
            self.attn = _HeadAttention(c)
            self.norm2 = nn.LayerNorm(c.width, eps=1e-6)
        else:
            self.norm = nn.LayerNorm(c.width, eps=1e-6)

        if c.gated:
            self.w1 = FAST.Linear(c.width, 2 * hidden)
            self.w2 = FAST.Linear(hidden, c.width)
        else:
            self.mlp = nn.Sequential(FAST.Linear(c.width, hidden), nn.SiLU(), FAST.Linear(hidden, c.width))
        self.heads = c.heads
        self.gated = c.gated

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        parts = modulation.split(x.shape[-1], -1)
        norm = self.norm2 if self.heads else self.norm
        if self.heads:
            scale, shift, gate = parts[:3]
            x = torch.addcmul(x, gate, self.attn(modulated(x, self.norm1, shift, scale)))

        scale, shift, gate = parts[-3:]
        h = modulated(x, norm, shift, scale)
        h = self.w2(silu_gated(self.w1(h))) if self.gated else self.mlp(h)
        return torch.addcmul(x, gate, h)


class _Final(nn.Module):
    """The last layer, modulated by 1 + scale and shift."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.norm = nn.LayerNorm(c.width, eps=1e-6, elementwise_affine=False)
        self.linear = FAST.Linear(c.width, c.channels)
        self.ada_ln_modulation = FAST.Linear(c.width, 2 * c.width)


class Head(nn.Module):
    """The denoiser. From a block's states x_t, a time t (0 is noise, 1 is data) and condition rows, it predicts the
    tokens of the block.

    It has plain layers, which stay on the device, because it runs once for every diffusion step.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        c = self.config = config
        self.time_embed = TimeEmbedding(c.width)
        self.cond_embed = FAST.Linear(c.condition, c.width)
        self.input_proj = FAST.Linear(c.channels, c.width)
        self.res_blocks = nn.ModuleList(_HeadBlock(c) for _ in range(c.depth))
        self.ada_ln_blocks = nn.ModuleList(
            FAST.Linear(c.width, (6 if c.heads else 3) * c.width) for _ in range(c.modulations)
        )
        self.final_layer = _Final(c)

    @property
    def modulation_numbers(self) -> int:
        """How many numbers all modulations of one row have together."""
        c = self.config
        return ((6 if c.heads else 3) * c.modulations + 2) * c.width

    def times(self, t: Tensor) -> Tensor:
        """Embeddings [N, W] of times fp32 [N]."""
        return self.time_embed(1000 * t)

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """The modulations of every adaLN layer and of the last layer; scales include the 1 of adaLN.

        ``embedding``: the sum of a time's and a condition's embedding, [..., W], for one or many diffusion steps.
        """
        active = F.silu(embedding)
        out = []
        for layer in (*self.ada_ln_blocks, self.final_layer.ada_ln_modulation):
            modulation = layer(active)
            modulation.unflatten(-1, (-1, self.config.width))[..., ::3, :] += 1
            out.append(modulation)

        return out

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Predicted tokens, fp32 [G, R, P, C], for states x_t, fp32 [R, P, C], which the G branches of guidance share.

        ``modulations``: [G, R, P, ...] each.
        """
        branches = len(modulations[-1])
        share = self.config.depth // self.config.modulations
        of_rows = [modulation.flatten(0, 1) for modulation in modulations]
        h = self.input_proj(x.to(self.input_proj.weight.dtype))
        if branches > 1:
            h = h.repeat(branches, 1, 1)
        for i, block in enumerate(self.res_blocks):
            h = block(h, of_rows[i // share])

        last = self.final_layer
        scale, shift = of_rows[-1].chunk(2, -1)
        out = last.linear(modulated(h, last.norm, shift, scale)).float().unflatten(0, (branches, -1))
        return torch.tanh(out / 2) if self.config.bounded else out

    def forward(self, x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        """Predicted tokens [R, P, C] for states x_t [R, P, C] at times t [R], with condition rows [R, P, D]."""
        embedding = self.times(t)[:, None] + self.cond_embed(rows.to(self.cond_embed.weight.dtype))
        return self.denoise(x, self.modulations(embedding[None]))[0]


# ------------------------------------------------------------------------------------------------ order and positions


def block_order(height: int, width: int, side: int) -> Tensor:
    """The cell of each token in the order of the tokens, int64 [L] on the CPU. Cells are counted in raster order.

    ``side``: tokens along one side of a block.

    Raises:
        ValueError: if the grid cannot be divided into blocks.
    """
    if height % side or width % side:
        raise ValueError(f"a grid of {height} x {width} tokens cannot be divided into blocks of {side} x {side}")

    cells = torch.arange(height * width).view(height // side, side, width // side, side)
    return cells.transpose(1, 2).flatten()


def sine_positions(height: int, width: int, dim: int) -> Tensor:
    """2-D position rows fp32 [L, dim] of a grid in raster order, on the CPU.

    The first half of a row encodes the column, the second half the row of the grid; in each, sines stand before
    cosines.
    """
    rates = 1.0 / 10000 ** (torch.arange(dim // 4, dtype=torch.float32) / (dim // 4))

    def encoded(count: int) -> Tensor:
        angle = torch.arange(count, dtype=torch.float32)[:, None] * rates
        return torch.cat([angle.sin(), angle.cos()], 1)

    across = encoded(width)[None].expand(height, -1, -1)
    down = encoded(height)[:, None].expand(-1, width, -1)
    return torch.cat([across, down], -1).flatten(0, 1)


# ------------------------------------------------------------------------------------------------ networks


class BlockNetwork(Llama):
    """What both networks share. The first block of rows after the prefix predicts the first block of tokens."""

    block: int  # tokens P of a block
    head_config: HeadConfig

    def _add_head(self, config: HeadConfig) -> None:
        """Add the diffusion head under its official name."""
        self.head_config = config
        self.head = nn.ModuleDict({"net": Head(config)})

    @property
    def denoiser(self) -> Head:
        """The diffusion head."""
        return cast(Head, self.head["net"])

    @property
    def channels(self) -> int:
        """Bits C of a token."""
        return self.head_config.channels

    @property
    def side(self) -> int:
        """Tokens along one side of a block."""
        return math.isqrt(self.block)

    def order(self, grid: tuple[int, int]) -> Tensor:
        """:func:`block_order` of a grid (height, width), on the device."""
        return block_order(*grid, self.side).to(self.compute_device)

    def places(self, grid: tuple[int, int]) -> Tensor:
        """Position rows fp32 [L, D] that are added to conditions, in the order of the tokens."""
        raise NotImplementedError

    def embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Embed tokens [R, n, C], with position rows [n, D]: rows [R, n, D]."""
        raise NotImplementedError

    def encodings(self, grid: tuple[int, int], prefix: int, lengths: Tensor | None) -> Positions:
        """Position encodings of the fed rows; row 0 is the first row after the prefix."""
        raise NotImplementedError

    def predictors(self, prefix: Tensor, rows: Tensor, grid: tuple[int, int]) -> Tensor:
        """Hidden rows [R, m, D] of whole sequences, without a cache; for training and tests.

        Args:
            prefix: rows [R, n, D], all prefixes of the same length.
            rows: [R, m, D], the first block of rows, then the embedded tokens of blocks.
            grid: tokens (height, width).
        """
        n = prefix.shape[1]
        m = rows.shape[1]
        place = torch.arange(-n, m, device=rows.device)
        last = torch.where(place < 0, place, place // self.block * self.block + self.block - 1)
        mask = place <= last[:, None]

        def attention(q: Tensor, kv: Tensor) -> Tensor:
            k, v = kv.chunk(2, 1)
            return attend(q, k, v, mask)

        x, rope = self._encode(torch.cat([prefix, rows], 1), self.encodings(grid, n, None).rows(place, len(rows)))
        for block in self.layers:
            x = block(x, rope, attention)

        return self.norm(x[:, n:])

    def begin(
        self, prefix: Tensor, lengths: Tensor | None, first: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, Cache]:
        """Feed the prefix, with causal attention, and then the first block of rows.

        Args:
            prefix: rows [R, n, D].
            lengths: int64 [R], the valid rows of each prefix; None: all.
            first: the first block of rows, [R, P, D].
            grid: tokens (height, width).

        Returns the hidden rows [R, P, D] that predict block 0, and the cache.
        """
        height, width = grid
        positions = self.encodings(grid, prefix.shape[1], lengths)
        _, cache = self.prefill(prefix, 0, height * width, lengths, positions=positions)
        return self.advance(first, 0, cache), cache

    def advance(self, rows: Tensor, at: int, cache: Cache) -> Tensor:
        """Feed the rows of one or more blocks, [R, n, D]; returns hidden rows [R, n, D], after the final norm.

        They are the rows ``at`` to ``at + n - 1`` after the prefix, and replace what was fed at these places or after
        them before. A row attends to its own block and to all blocks before it.
        """
        n = rows.shape[1]
        place = torch.arange(at, at + n, device=rows.device)
        end = cache.prefix + at + n
        mask = None
        if n > self.block:
            visible = cache.prefix + (place // self.block + 1) * self.block
            mask = torch.arange(end, device=rows.device) < visible[:, None]

        return self.norm(self.feed(rows, place, cache.prefix + place, cache, end, mask))


class BitDanceText(BlockNetwork):
    """The language model without its output layer, with the projector of tokens and the diffusion head."""

    def __init__(self, config: LlamaConfig, head: HeadConfig, block: int, operations: Operations = FAST):
        super().__init__(config, operations)
        self.block = block
        fc1 = operations.Linear(head.channels, config.dim)
        fc2 = operations.Linear(config.dim, config.dim)
        self.projector = nn.ModuleDict({"fc1": fc1, "fc2": fc2})
        self._add_head(head)

    def places(self, grid: tuple[int, int]) -> Tensor:
        order = block_order(*grid, self.side)
        return sine_positions(*grid, self.config.dim)[order].to(self.compute_device)

    def embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        projector = self.projector
        inner = projector["fc1"](tokens.to(self.norm.weight.dtype))
        rows = projector["fc2"](F.gelu(inner, approximate="tanh"))
        return (rows.float() + places).to(rows.dtype)

    def encodings(self, grid: tuple[int, int], prefix: int, lengths: Tensor | None) -> Positions:
        height, width = grid
        table = self.rope(torch.arange(prefix + height * width, device=self.compute_device))
        return Positions(table=table, offset=prefix if lengths is None else lengths[:, None])


@dataclass(frozen=True)
class BitDanceConfig(LlamaConfig):
    """Shape of an ImageNet model."""

    rows: int = 0  # rows of a class
    block: int = 1  # tokens P of a block
    tokens: int = 0  # tokens L of an image, a square grid

    @property
    def grid(self) -> int:
        """Tokens along one side of the image."""
        return math.isqrt(self.tokens)

    @staticmethod
    def of_bitdance(state: Mapping[str, Tensor], heads: int | None = None) -> BitDanceConfig:
        """Derive the shape from official parameter names. ``heads``: None takes the number of the official size with
        the same width.

        Raises:
            KeyError: the state dict is not of this network.
            ValueError: the head count is unknown or does not fit, or tokens or blocks are not squares.
        """
        tokens, dim = state["pos_for_diff.weight"].shape
        heads = heads or OFFICIAL_HEADS.get(dim)
        if heads is None:
            raise ValueError(
                f"no official BitDance has the width {dim}, so the number of attention heads must be stated"
            )
        if dim % heads or dim // heads % 4:
            raise ValueError(f"heads: {heads} does not fit the width {dim}")

        embeddings, numbers = state["cls_embedding.weight"].shape
        block = 1 + (state["query_token"].shape[1] if "query_token" in state else 0)
        side = math.isqrt(tokens)
        across = math.isqrt(block)
        if numbers % dim or numbers < 2 * dim:
            raise ValueError(f"its classes have {numbers} numbers, which are not two or more rows of {dim}")
        if side**2 != tokens or across**2 != block or side % across:
            raise ValueError(f"its {tokens} tokens do not form a square of square blocks of {block} tokens")

        return BitDanceConfig(
            dim=dim,
            depth=depth(state, "layers."),
            heads=heads,
            kv_heads=heads,
            hidden=state["layers.0.feed_forward.w2.weight"].shape[1],
            vocab=0,
            condition=CLASS,
            condition_size=embeddings - 1,
            tied=True,
            eps=1e-6,
            rows=numbers // dim,
            block=block,
            tokens=tokens,
        )


class BitDanceClass(BlockNetwork):
    """The transformer of an ImageNet model with its diffusion head. The last row of a class is in the first block."""

    config: BitDanceConfig

    def __init__(self, config: BitDanceConfig, head: HeadConfig, operations: Operations = FAST):
        Recordable.__init__(self, operations)  # not Llama's, because this network has different tables
        c = self.config = config
        self.block = c.block
        self.cls_embedding = nn.Embedding(c.condition_size + 1, c.rows * c.dim)  # type: ignore[assignment]
        if c.block > 1:
            self.query_token = nn.Parameter(torch.zeros(1, c.block - 1, c.dim))
        self.proj_in = SwiGLU(head.channels, c.dim * 3 // 2, c.dim, bias=True, operations=operations)
        self.emb_norm = Norm(c.dim, c.eps)

        self.layers = nn.ModuleList()
        for _ in range(c.depth):
            mlp = SwiGLU(c.dim, c.hidden, c.dim, bias=False, operations=operations)
            self.layers.append(Block(c, operations, mlp))

        self.norm = Norm(c.dim, c.eps)
        self.pos_for_diff = nn.Embedding(c.tokens, c.dim)
        self._add_head(head)

    def class_rows(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix [R, rows - 1, D] and the first block of rows [R, P, D] of labels int64 [R].

        A label equal to the number of classes is the null class.
        """
        rows = self.cls_embedding(labels).unflatten(1, (self.config.rows, -1))
        first = rows[:, -1:]
        if self.block > 1:
            first = torch.cat([first, self.query_token.expand(len(rows), -1, -1)], 1)

        return self.emb_norm(rows[:, :-1]), self.emb_norm(first)

    def places(self, grid: tuple[int, int]) -> Tensor:
        return self.pos_for_diff.weight.float()

    def embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.emb_norm(self.proj_in(tokens.to(self.norm.weight.dtype)))

    def encodings(self, grid: tuple[int, int], prefix: int, lengths: Tensor | None) -> Positions:
        """2-D RoPE by the tokens' own cells, whose rows and columns count from 1.5. The prefix and the first block of
        rows are not rotated.
        """
        c = self.config
        device = self.compute_device
        count = c.head_dim // 4
        rates = c.theta ** (-torch.arange(count, device=device).float() / count)
        order = self.order(grid)
        row = torch.div(order, grid[1], rounding_mode="floor")
        column = order % grid[1]

        across = (column + 1.5)[:, None] * rates
        down = (row + 1.5)[:, None] * rates
        angle = torch.cat([across, down], -1)
        unrotated = angle.new_zeros(prefix + self.block, 2 * count)
        return Positions(table=rope_table(torch.cat([unrotated, angle]), pairs=True), offset=prefix)


# ------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Marks:
    """Ids of the special tokens of a prompt and of the image after it."""

    begin: int  # begins a turn
    end: int  # ends a turn
    image: int  # begins the image
    sizes: Mapping[int, int]  # for each number of tokens along a side, the token that states it
    queries: tuple[int, ...]  # the P - 1 query rows


@dataclass(frozen=True, eq=False)
class BlockModel:
    """A BitDance and the metadata of its files."""

    net: BlockNetwork  # the network in eval mode
    name: str  # display name for messages and reports
    stride: int  # pixels along one side of a token
    time_shift: float = 1.0  # shift of the diffusion's times; 1 is none
    label_set: str = ""  # name of the label list ("imagenet-1k", "picture-book"), or "" if unknown
    note: str = ""  # what decides the result without being stated by user or file
    tokenize: Callable[[str], list[int]] | None = None  # for a text model: text to ids, without special tokens
    marks: Marks | None = None  # for a text model

    family: ClassVar[str] = "bitdance"  # see runs/families/__init__.py

    @property
    def condition(self) -> str:
        """Kind of condition it is sampled with."""
        return self.net.config.condition

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"transformer": without(self.net, self.net.head), "head": self.net.head}

    @property
    def device(self) -> torch.device:
        """Device on which it computes."""
        return self.net.compute_device

    @property
    def usual_size(self) -> tuple[int, int]:
        """Height and width in pixels of an image whose size is not set."""
        if isinstance(self.net, BitDanceClass):
            side = self.net.config.grid * self.stride
            return side, side

        if self.sizes:
            return self.sizes[0]

        # Of a text model of another kind: at most eight blocks along a side, whose number a token must say.
        assert self.marks is not None, "a text model"
        unit = self.net.side
        blocks = max((side // unit for side in self.marks.sizes if side % unit == 0 and side <= 8 * unit), default=1)
        return blocks * unit * self.stride, blocks * unit * self.stride

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width in pixels of all images it was trained for; () for a text model of another kind."""
        if isinstance(self.net, BitDanceClass):
            return (self.usual_size,)
        if self.stride != 16 or self.net.block not in (16, 64):
            return ()

        listed = LARGE_SIZES if self.net.block == 64 else LARGE_SIZES + SMALL_SIZES
        both: dict[tuple[int, int], None] = {}  # in the order of the list, squares once
        for height, width in listed:
            both[height, width] = None
            both[width, height] = None

        return tuple(both)

    def grid(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Tokens (height, width) of an image with this many pixels; None: the usual height or width.

        Raises:
            UserError: the model does not generate this size.
        """
        usual = self.usual_size
        height = usual[0] if height is None else height
        width = usual[1] if width is None else width
        if self.sizes and (height, width) not in self.sizes:
            names = ", ".join(f"{w} x {h}" for h, w in self.sizes)
            raise UserError(f"width: {self.name} does not generate {width} x {height}; choose one of {names}.")

        unit = self.stride * self.net.side
        if height % unit or width % unit or min(height, width) < unit:
            raise UserError(
                f"width: {width} x {height} cannot be divided into blocks of {unit} x {unit} pixels; choose multiples "
                f"of {unit}."
            )

        grid = (height // self.stride, width // self.stride)
        if self.marks is not None:
            missing = [side for side in grid if side not in self.marks.sizes]
            if missing:
                raise UserError(
                    f"width: {width} x {height} needs the token <|res_{missing[0]}|>, but the tokenizer of {self.name} "
                    "does not have it; choose a smaller size."
                )
        return grid

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt in its template, as typed.

        If the text contains names of special tokens, they are plain text.

        Raises:
            UserError: the text is too long, or encoded outside the vocabulary.
        """
        expect_text(text)
        return self._ids([f"user\n{text}"])

    def null_prompt(self) -> list[int]:
        """Token ids of the null branch of guidance: the template without the user's turn."""
        return self._ids([])

    def _ids(self, turns: Sequence[str]) -> list[int]:
        marks = self.marks
        assert marks is not None and self.tokenize is not None, "a text model"
        ids = chat(turns, self.tokenize, (marks.begin, marks.end))
        return checked(ids, self.net.config.vocab, MOST_IDS, self.name)

    def prompt_rows(self, ids: Sequence[Sequence[int]], grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of prompts: prefix [R, n, D], number of valid rows int64 [R], and first block of rows [R, P, D].

        Raises:
            UserError: the image does not fit after a prompt.
        """
        net = self.net
        marks = self.marks
        assert marks is not None and net.config.condition == PROMPT, "a text model"
        height, width = grid
        parts = [[*one, marks.image, marks.sizes[height]] for one in ids]
        longest = max(map(len, parts))
        room = net.config.positions
        if longest + height * width > room:
            raise UserError(
                f"width: {height * width} image tokens after a prompt of {longest} tokens exceed the {room} positions "
                f"of {self.name}; choose a smaller size or a shorter prompt."
            )

        device = net.compute_device
        padded = torch.tensor([[*part, *[part[-1]] * (longest - len(part))] for part in parts], device=device)
        lengths = torch.tensor([len(part) for part in parts], device=device)
        first = torch.tensor([marks.sizes[width], *marks.queries], device=device).expand(len(parts), -1)
        return net.tok_embeddings(padded), lengths, net.tok_embeddings(first)
