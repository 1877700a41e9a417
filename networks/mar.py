"""MAR with the official parameter names: encoder, decoder, diffusion head, and the condition that these networks read.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838). Dropout is
left out. Shapes: B images, L tokens, C transformer width, w head width.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .graphs import State
from .ops import FAST, Operations
from .speed import Recordable, recorded
from .structure import depth
from .torch_state import dot_product_attention, to_device

# Attention heads of the official sizes B, L and H by width. No state dict holds their number, so other sizes need
# the metadata "heads".
OFFICIAL_HEADS = {768: 12, 1024: 16, 1280: 16}


@dataclass(frozen=True)
class MARConfig:
    """Shape of a MAR."""

    dim: int  # transformer width C
    encoder_depth: int  # number of blocks
    decoder_depth: int
    heads: int  # attention heads
    buffer: int  # class rows in front of the tokens
    tokens: int  # tokens of an image (a square grid)
    channels: int  # channels per token (latent channels times patch area)
    classes: int  # number of class labels; 0 for none
    head_depth: int  # residual blocks of the diffusion head
    head_width: int  # width of the diffusion head

    @cached_property
    def grid(self) -> int:
        """Tokens along one side of the image."""
        return math.isqrt(self.tokens)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], heads: int | None = None) -> MARConfig:
        """Derive the shape from official parameter names. ``heads``: None takes the number of the official size with
        the same width.

        Raises:
            KeyError: the state dict is not a MAR's.
            ValueError: the head count is unknown or does not fit, or the tokens are not a square.
        """
        dim = state["class_emb.weight"].shape[1]
        tokens = state["diffusion_pos_embed_learned"].shape[1]

        heads = heads or OFFICIAL_HEADS.get(dim)
        if heads is None:
            raise ValueError(f"no official MAR has the width {dim}, so the number of attention heads must be stated")
        if dim % heads:
            raise ValueError(f"heads: {heads} does not divide the width {dim}")
        if math.isqrt(tokens) ** 2 != tokens:
            raise ValueError(f"{tokens} tokens are not a square grid")

        return MARConfig(
            dim=dim,
            encoder_depth=depth(state, "encoder_blocks."),
            decoder_depth=depth(state, "decoder_blocks."),
            heads=heads,
            buffer=state["encoder_pos_embed_learned"].shape[1] - tokens,
            tokens=tokens,
            channels=state["z_proj.weight"].shape[1],
            classes=state["class_emb.weight"].shape[0],
            head_depth=depth(state, "diffloss.net.res_blocks."),
            head_width=state["diffloss.net.input_proj.weight"].shape[0],
        )


# Stores of a pass that keeps nothing.
NONE_KEPT = State()

# How many numbers of modulations of the head are computed at once; one diffusion step may need more.
BUDGET = 1 << 24


def modulated(x: Tensor, norm: nn.Module, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x) * scale + shift, [..., w], for rows x [..., w]; each row has its own shift and scale, [..., w]. The scale
    includes the 1 of adaLN.
    """
    return torch.addcmul(shift, norm(x), scale)


class HeadBlock(nn.Module):
    """Residual MLP block modulated by time and condition (adaLN): x + gate * MLP(LN(x) (1 + scale) + shift)."""

    def __init__(self, width: int, operations: Operations = FAST):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(operations.Linear(width, width), nn.SiLU(), operations.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 3 * width))


class _Final(nn.Module):
    """The last layer, modulated by time and condition."""

    def __init__(self, width: int, out: int, operations: Operations = FAST):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = operations.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 2 * width))


class TimeEmbedding(nn.Module):
    """Timesteps [N] to vectors [N, w]: cosines and sines of 128 frequencies, then an MLP."""

    def __init__(self, width: int, operations: Operations = FAST):
        super().__init__()
        self.mlp = nn.Sequential(operations.Linear(256, width), nn.SiLU(), operations.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32, device=t.device) / 128)
        angles = t[:, None].float() * rates
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


class DiffusionHead(nn.Module):
    """MAR's per-token denoiser (SimpleMLPAdaLN): noisy token, timestep and condition z to noise and variance logits."""

    def __init__(self, channels: int, width: int, depth: int, z_channels: int, operations: Operations = FAST):
        super().__init__()
        self.channels = channels
        self.time_embed = TimeEmbedding(width, operations)
        self.cond_embed = operations.Linear(z_channels, width)
        self.input_proj = operations.Linear(channels, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width, operations) for _ in range(depth))
        self.final_layer = _Final(width, 2 * channels, operations)
        self.modulation_numbers = (3 * depth + 2) * width  # of all modulations of one row

    def modulations(self, embedding: Tensor, blocks: Iterable[nn.Module] | None = None) -> list[Tensor]:
        """adaLN modulations [..., w]: shift, 1 + scale and gate of each block, shift and 1 + scale of the last layer.

        ``embedding`` [..., w] is ``time_embed(t) + cond_embed(z)``, of one or many diffusion steps; ``blocks`` None:
        all blocks.
        """
        active = F.silu(embedding)
        if blocks is None:
            blocks = self.res_blocks

        out = []
        for layer in (*blocks, self.final_layer):
            shift, scale, *gate = layer.adaLN_modulation[1](active).split(active.shape[-1], -1)
            out += [shift, 1 + scale, *gate]

        return out

    def gates(self, embedding: Tensor, blocks: Iterable[nn.Module]) -> list[Tensor]:
        """The gates of some blocks alone, the last of their :meth:`modulations`, [..., w] each."""
        active = F.silu(embedding)
        width = active.shape[-1]

        out = []
        for block in blocks:
            layer = block.adaLN_modulation[1]
            out.append(F.linear(active, layer.weight[2 * width :], layer.bias[2 * width :]))
        return out

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Predicted noise, then variance logits, fp32 [..., N, 2 channels], for states x of tokens, fp32 [N, channels].

        A variance logit from -1 to 1 lies between the two bounds of the variance. ``modulations``, [..., N, w], may be
        those of several branches of guidance. The branches share the rows before the first modulation.
        """
        h = self.input_proj(x.to(self.input_proj.weight.dtype))
        for i, block in enumerate(self.res_blocks):
            shift, scale, gate = modulations[3 * i : 3 * i + 3]
            h = torch.addcmul(h, gate, block.mlp(modulated(h, block.in_ln, shift, scale)))

        # The last layer stays in fp32: at t = 999 its errors are multiplied by hundreds (samplers/mar/tables.py).
        last = self.final_layer.linear
        h = modulated(h, self.final_layer.norm_final, *modulations[-2:])
        return last(h.to(last.weight.dtype))

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """:meth:`denoise` for x [N, channels], t [N] in 0..999 and z [N, z_channels]: [N, 2 channels]."""
        return self.denoise(x, self.modulations(self.time_embed(t) + self.cond_embed(z)))


class Attention(nn.Module):
    """Weights of multi-head self-attention. :class:`Block` computes the attention, as a cache may come in between."""

    def __init__(self, dim: int, heads: int, operations: Operations = FAST):
        super().__init__()
        self.heads = heads
        self.qkv = operations.Linear(dim, 3 * dim)
        self.proj = operations.Linear(dim, dim)


class Norm(nn.LayerNorm):
    """LayerNorm in fp32, as under autocast. Its output has the dtype of the weights, which the next product reads."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        bias = self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class Block(nn.Module):
    """Pre-norm ViT block: exact GELU, no layer scale, no query/key norm.

    The residual stream is fp32, see :mod:`.precision`.
    """

    def __init__(self, dim: int, heads: int, operations: Operations = FAST):
        super().__init__()
        self.norm1 = Norm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, operations)
        self.norm2 = Norm(dim, eps=1e-6)
        fc1 = operations.Linear(dim, 4 * dim)
        fc2 = operations.Linear(4 * dim, dim)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        out: Tensor | None = None,
        store: Tensor | None = None,
        places: int | Tensor = 0,
    ) -> Tensor:
        """The block's output for rows x [B, N, C]: [B, N, C], or [B, M, C] for the rows ``out``.

        Args:
            key_mask: bool [B, N], True for rows that may be attended to; None for all.
            out: int64 [B, M], indices of the rows to compute; None for all.
            store: keys and values of the rows of the sequence that are not in x; the rows of x attend to them too.
                None: x has all rows.
            places: the places of the rows of x in the sequence, see :func:`update`.
        """
        q, kv = self.project(x)
        if store is not None:
            kv = update(store, kv, places)
        return self.attend(x, q, kv, key_mask, out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, heads, N, d], and keys and values [2, B, heads, N, d], of rows x [B, N, C]; d is C / heads."""
        b, n, c = x.shape
        heads = self.attn.qkv(self.norm1(x)).view(b, n, 3, self.attn.heads, c // self.attn.heads)
        projected = heads.permute(2, 0, 3, 1, 4)
        return projected[0], projected[1:]

    def attend(
        self, x: Tensor, q: Tensor, kv: Tensor, key_mask: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The rest of the block after :meth:`project`; arguments and result as for :meth:`forward`, and:

        Args:
            q: queries of the rows of x, [B, heads, N, d].
            kv: keys and values of the rows to attend to, [2, B, heads, S, d].
        """
        if out is not None:
            x = pick(x, out)
            q = pick(q, out)

        k, v = kv
        mask = None if key_mask is None else key_mask[:, None, None]
        mixed = dot_product_attention(q, k, v, mask)
        x = x.float() + self.attn.proj(mixed.transpose(1, 2).flatten(2))  # fp32 in 16 bits too
        return x + self.mlp(self.norm2(x))


def update(store: Tensor, kv: Tensor, places: int | Tensor) -> Tensor:
    """Store the keys and values of computed rows, and return the keys and values of all rows of the sequence.

    Args:
        store: the keys, then the values of a block, [2, E, heads, rows, d].
        kv: keys and values of the computed rows, [2, B, heads, n, d]; only the first E batch entries are stored.
        places: the places of the computed rows in the store, as one of two kinds:

            - an int, the place of the first computed row. The other rows follow it, and the sequence ends with the
              last. Rows whose place would be below 0 are not stored.
            - int64 [E, n], a place for each row; the sequence is the whole store.
    """
    if isinstance(places, Tensor):
        store.scatter_(3, places[None, :, None, :, None].expand_as(kv), kv)
        return store

    end = places + kv.shape[3]
    store[:, :, :, max(0, places) : end] = kv[:, : store.shape[1], :, max(0, -places) :]
    return kv if places <= 0 else store[:, :, :, :end]  # from place 0 on, all rows of the sequence were computed


def _blocks(c: MARConfig, count: int, operations: Operations) -> list[Block]:
    """A ModuleList, typed by its entries."""
    return cast(list[Block], nn.ModuleList(Block(c.dim, c.heads, operations) for _ in range(count)))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """The rows ``index``, int64 [B, M], of x: [B, M, C] of [B, N, C], or [B, heads, M, d] of [B, heads, N, d]."""
    index = index[:, None, :, None] if x.ndim == 4 else index[..., None]
    return x.gather(-2, index.expand(*x.shape[:-2], -1, x.shape[-1]))


class MAR(Recordable):
    """Masked autoregressive transformer over continuous tokens, with its diffusion head."""

    def __init__(self, config: MARConfig, operations: Operations = FAST):
        super().__init__(operations)
        c = self.config = config
        if c.classes:
            self.class_emb = nn.Embedding(c.classes, c.dim)
        self.fake_latent = nn.Parameter(torch.empty(1, c.dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.dim))

        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, c.buffer + c.tokens, c.dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, c.buffer + c.tokens, c.dim))
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, c.tokens, c.dim))

        self.z_proj = operations.Linear(c.channels, c.dim)
        self.z_proj_ln = Norm(c.dim, eps=1e-6)
        self.encoder_blocks = _blocks(c, c.encoder_depth, operations)
        self.encoder_norm = Norm(c.dim, eps=1e-6)

        self.decoder_embed = operations.Linear(c.dim, c.dim)
        self.decoder_blocks = _blocks(c, c.decoder_depth, operations)
        self.decoder_norm = Norm(c.dim, eps=1e-6)

        # The head has plain layers, which stay on the device, because it runs once for every diffusion step.
        head = DiffusionHead(c.channels, c.head_width, c.head_depth, c.dim, FAST)
        self.diffloss = nn.ModuleDict({"net": head})

    @property
    def head(self) -> DiffusionHead:
        """The diffusion head."""
        return cast(DiffusionHead, self.diffloss["net"])

    def class_rows(self, labels: Tensor | None, batch: int) -> Tensor:
        """Class vectors [B, C]: of ``labels`` int64 [B], or the null class of guidance for None."""
        return self.fake_latent.expand(batch, -1) if labels is None else self.class_emb(labels)

    def embed_known(self, tokens: Tensor, known: Tensor, class_rows: Tensor) -> Tensor:
        """The encoder's input [B, buffer + K, C].

        Args:
            tokens: [B, L, channels].
            known: int64 [B, K], positions of the tokens that are read.
            class_rows: [B, C], vectors of the buffer rows, which stand in front.
        """
        b = tokens.shape[0]
        buffer = self.config.buffer
        dtype = self.z_proj.weight.dtype
        rows = class_rows.to(dtype)[:, None].expand(-1, buffer, -1)
        x = torch.cat([rows, self.z_proj(pick(tokens, known).to(dtype))], dim=1)

        at = torch.cat([torch.arange(buffer, device=known.device).expand(b, -1), known + buffer], dim=1)
        return self.z_proj_ln(x + pick(self.encoder_pos_embed_learned.expand(b, -1, -1), at))

    def encode(
        self,
        tokens: Tensor,
        known: Tensor,
        class_rows: Tensor,
        padding_mask: Tensor | None = None,
        stores: State = NONE_KEPT,
    ) -> Tensor:
        """Encoder output [B, buffer + K, C].

        Arguments as for :meth:`embed_known`, and:

        Args:
            padding_mask: bool [B, K], False for padding.
            stores: one for each block; they receive the keys and values of the tokens for :meth:`encode_more`.
        """
        x = self.embed_known(tokens, known, class_rows)
        key_mask = None
        if padding_mask is not None:
            key_mask = F.pad(padding_mask, (self.config.buffer, 0), value=True)

        return run_encoder(self, x, key_mask, stores, -self.config.buffer)

    def encode_more(self, tokens: Tensor, new: Tensor, class_rows: Tensor, stores: State, known: int) -> Tensor:
        """Encoder output [B, K + buffer, C]: first the rows of K new tokens, then the class rows.

        The class rows attend to all tokens, so they are computed again in every pass. The stores have no fixed place
        for the class rows: they stand after the tokens, where the next pass writes its tokens. For example, with 2
        class rows (c), after :meth:`encode` with 4 tokens (t), a pass with 3 new tokens (n)::

            place           0 1 2 3 4 5 6 7 8
            stored before   t t t t
            computed                n n n c c
            stored after    t t t t n n n c c

        Arguments as for :meth:`embed_known`, with the positions ``new`` int64 [B, K], and:

        Args:
            stores: one for each block; they hold the ``known`` earlier tokens, and receive the new ones.
        """
        x = self.embed_known(tokens, new, class_rows)
        return run_encoder(self, x.roll(-self.config.buffer, 1), None, stores, known)

    def decoder_rows(
        self, encoded: Tensor, known: Tensor, padding_mask: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """The decoder's rows [B, buffer + L, C] before positions are added: the encoded rows at their places.

        ``rows``: the result of an earlier pass, in which the encoded rows are replaced, in place; all other rows stay.
        None: all other rows are mask tokens.
        """
        b = known.shape[0]
        buffer = self.config.buffer
        length = self.config.tokens

        x = self.decoder_embed(encoded)
        if rows is None:
            masked = self.mask_token.to(x.dtype)
            rows = masked.expand(b, buffer + length + (padding_mask is not None), -1).clone()
        rows[:, :buffer] = x[:, :buffer]

        # Padding goes to a row that is cut off.
        at = known if padding_mask is None else torch.where(padding_mask, known, length)
        rows.scatter_(1, (at + buffer)[..., None].expand(-1, -1, x.shape[2]), x[:, buffer:])
        return rows[:, : buffer + length]

    def decode(
        self, encoded: Tensor, known: Tensor, wanted: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Conditions z [B, M, C] for the head, from the encoder's output for the ``known`` positions.

        ``wanted``: int64 [B, M], positions whose z is needed; the last block computes only these. None: all L
        positions.
        """
        x = self.decoder_rows(encoded, known, padding_mask) + self.decoder_pos_embed_learned
        if wanted is None:
            wanted = torch.arange(self.config.tokens, device=x.device).expand(len(x), -1)
        features, _ = run_decoder(self, x, wanted)
        return self.conditions(features, wanted)

    def conditions(self, features: Tensor, positions: Tensor) -> Tensor:
        """Conditions z [B, M, C] for the head, from the decoder's rows [B, M, C] at positions int64 [B, M]."""
        place = self.diffusion_pos_embed_learned.expand(len(positions), -1, -1)
        return self.decoder_norm(features) + pick(place, positions)


class DecoderCache(NamedTuple):
    """What the decoder keeps of N rows from one pass to the next, if its later blocks compute only some rows."""

    block: int  # index from 0 of the block that measures how much a row changed; the *later* blocks follow it
    stores: State  # a store for each later block, [2, E, heads, N, d]
    measured: State  # one tensor: the values of the measuring block in the previous pass, [E, heads, N, d]


@recorded
def run_encoder(net: MAR, x: Tensor, key_mask: Tensor | None, stores: State, places: int) -> Tensor:
    """The encoder's output [B, N, C] of its input x [B, N, C]; other arguments as for :func:`run_blocks`."""
    return net.encoder_norm(run_blocks(net, net.encoder_blocks, x, key_mask, None, stores, places))


@recorded
def run_decoder(
    net: MAR,
    x: Tensor,
    wanted: Tensor,
    cache: DecoderCache | None = None,
    choose: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output [B, M, C] of the decoder's blocks at positions ``wanted``, int64 [B, M]; and the rows that the later
    blocks computed, int64 [B, n], or None if they computed all.

    Args:
        x: rows [B, N, C] of :meth:`MAR.decoder_rows`, plus their position embeddings.
        cache: receives keys and values; None: nothing is kept.
        choose: chooses the rows that the blocks after ``cache.block`` compute, int64 [B, n], the wanted rows first. Its
            arguments are the values of ``cache.block`` in this pass and in the previous pass, [B, heads, N, d] each.
            None: the later blocks compute all rows.
    """
    blocks = list(net.decoder_blocks)
    wanted_rows = wanted + net.config.buffer
    if cache is None:
        return run_blocks(net, blocks, x, None, wanted_rows), None

    # 1. All rows, up to the projections of the measuring block. Its values decide which rows the later blocks compute.
    block = blocks[cache.block]
    x = run_blocks(net, blocks[: cache.block], x)
    q, kv = block.project(x)
    measured = cache.measured[0]
    chosen = None if choose is None else choose(kv[1], measured)
    measured.copy_(kv[1, : len(measured)])

    # 2. The chosen rows. The later blocks have the keys and values of all other rows in their stores.
    x = block.attend(x, q, kv, None, chosen)
    out = wanted_rows
    places: int | Tensor = 0
    if chosen is not None:
        out = torch.arange(wanted.shape[1], device=x.device).expand(len(x), -1)
        places = chosen
    return run_blocks(net, blocks[cache.block + 1 :], x, None, out, cache.stores, places), chosen


def run_blocks(
    net: MAR,
    blocks: Sequence[Block],
    x: Tensor,
    key_mask: Tensor | None = None,
    out: Tensor | None = None,
    stores: Sequence[Tensor] = (),
    places: int | Tensor = 0,
) -> Tensor:
    """The output of blocks for rows x [B, N, C]; the last block computes the rows ``out`` only.

    Arguments as for :meth:`Block.forward`, but ``stores`` has one store for each block; () for none.
    """
    run = net.compiled(Block.forward, "transformer blocks")
    for i, block in enumerate(blocks):
        rows = out if i + 1 == len(blocks) else None
        if stores:  # not compiled: every combination of a store's slices and chosen rows would need its own graph
            x = block(x, key_mask, rows, stores[i], places)
        else:
            x = run(block, x, key_mask, rows)
    return x


class Conditioning:
    """The condition of B images as the network reads it.

    It gives the vectors of the encoder's buffer rows, and may change the encoder's output before the decoder reads it.
    Here it does not change the output.
    """

    # Whether the encoder reads the condition. If so, the branches of guidance differ in the encoder.
    read_by_encoder: ClassVar[bool] = False

    def __len__(self) -> int:
        """Number of images B."""
        raise NotImplementedError

    def of(self, images: Sequence[int]) -> Conditioning:
        """The condition of some of the images, in this order; an image may be listed several times."""
        raise NotImplementedError

    def vectors(self, guided: bool) -> Tensor:
        """Vectors [E, C] of the encoder's buffer rows.

        E is B, or 2 B if the branches of guidance differ in the encoder.
        """
        raise NotImplementedError

    def fuse(
        self, encoded: Tensor, known: Tensor, guided: bool, padding_mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """The decoder's input rows [D, buffer + K, C]. D is B, or 2 B with guidance, the unconditional branch last.

        Args:
            encoded: the encoder's output [E, buffer + K, C].
            known: the positions of its tokens, int64 [E, K].
            cache: from :meth:`feature_cache`; it receives what :meth:`extend` reads.
        """
        return encoded

    def feature_cache(self, live: int, room: int) -> Any:
        """A cache for :meth:`fuse` and :meth:`extend` (LazyMAR); None: there is nothing to keep.

        Args:
            live: batch rows of the decoder's input.
            room: how many tokens and buffer rows a batch row may have.
        """
        return None

    def extend(self, encoded: Tensor, cache: Any, known: int) -> Tensor:
        """:meth:`fuse` for new tokens only, [D, N + buffer, C].

        Args:
            encoded: the encoder's output for N new tokens, then for the buffer rows, [E, N + buffer, C].
            cache: holds the ``known`` earlier tokens, and receives the new ones.
        """
        return encoded

    def counts(self, encoder: int, decoder: int) -> dict[str, int]:
        """Counts of a pass for the report.

        ``encoder``, ``decoder``: how many rows the encoder and an average block of the decoder computed, in all
        branches.
        """
        return {"transformer_passes": 1, "transformer_tokens": encoder + decoder}


class ClassConditioning(Conditioning):
    """Class labels int64 [B]. The branches of guidance differ in the encoder; its output is the decoder's input."""

    read_by_encoder: ClassVar[bool] = True

    def __init__(self, net: MAR, labels: Tensor):
        self.mar = net
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, images: Sequence[int]) -> ClassConditioning:
        return ClassConditioning(self.mar, self.labels[to_device(torch.tensor(images), self.labels.device)])

    def vectors(self, guided: bool) -> Tensor:
        rows = self.mar.class_emb(self.labels)
        return torch.cat([rows, self.mar.fake_latent.expand_as(rows)]) if guided else rows


@dataclass(frozen=True, eq=False)
class MARModel:
    """A MAR and the metadata of its file."""

    net: MAR  # the network in eval mode; weights in the compute dtype, the head's last layer in fp32
    name: str  # display name for messages and reports
    latent_scale: float = 0.2325  # tokens = latent scale x decoder latents; 1 for the demo
    t_max: int = 999  # diffusion timestep from which this checkpoint should start; 999 officially
    patch: int = 1  # latent positions a token covers per side; 1 in every official file
    label_set: str = ""  # name of the label list ("imagenet-1k", "picture-book"), or "" if unknown
    max_beta: float = 0.999  # largest beta of the diffusion the head was trained with; 0.999 for every MAR
    assumed: str = ""  # what decides the result without being stated by user or file
    condition: ClassVar[str] = "class"  # kind of condition it is sampled with
    family: ClassVar[str] = "mar"  # see runs/families/__init__.py

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"MAR": self.net}

    @property
    def device(self) -> torch.device:
        """Device on which it computes."""
        return next(self.net.parameters()).device

    def weights(self) -> dict[str, int]:
        """Bytes of the weights by part."""
        sizes = {}
        for name, part in self.parts.items():
            sizes[name] = sum(p.nbytes for p in part.parameters())

        return sizes

    @property
    def note(self) -> str:
        """A remark for the report, or ""."""
        return self.assumed

    def working_bytes(self, rows: int) -> dict[str, int]:
        """Upper estimate of the activations of one pass, bytes by part. ``rows``: the decoder's rows in all images and
        branches.
        """
        element = next(self.net.parameters()).element_size()
        # Two rows of the residual stream are fp32, and the place of a row is a number of 8 bytes.
        return {"MAR": rows * (self.net.config.dim * (14 * element + 8) + 8)}

    def prompt_bytes(self, tokens: int) -> int:
        """Memory of a language model's keys and values for this many ``tokens``; 0 without a language model."""
        return 0

    def first_timestep(self, diffusion_steps: int) -> int:
        """Highest timestep of every table of a run with ``diffusion_steps`` steps, if the run does not set ``t_max``.

        Shorter tables of the run (DiSA's, FastHybrid's guided steps) start there too, so that all tokens are denoised
        from the same level of noise.
        """
        return self.t_max

    def to_latents(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L, channels] to decoder latents [B, C, H, W], fp32."""
        g = self.net.config.grid
        p = self.patch
        x = tokens.float().view(len(tokens), g, g, -1, p, p).permute(0, 3, 1, 4, 2, 5)

        return x.reshape(len(tokens), -1, g * p, g * p) / self.latent_scale

    def to_tokens(self, latents: Tensor) -> Tensor:
        """Decoder latents [B, C, H, W] to tokens [B, L, channels]: the inverse of :meth:`to_latents`."""
        g = self.net.config.grid
        p = self.patch
        x = latents.view(len(latents), -1, g, p, g, p).permute(0, 2, 4, 1, 3, 5)

        return x.reshape(len(latents), g * g, -1) * self.latent_scale
