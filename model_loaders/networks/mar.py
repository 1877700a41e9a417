"""MAR's encoder, decoder and diffusion head, with the official parameter names.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838). Dropout is
left out: it has no parameters and is off in inference. The sampling loop is in ``samplers``; this module has the
parts that it, the caches and the training call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .diffusion_head import DiffusionHead
from .ops import Linear
from .speed import Regional
from .structure import depth

# The head count is in no state dict. Official sizes B, L, H by width; others need metadata "heads".
OFFICIAL_HEADS = {768: 12, 1024: 16, 1280: 16}


@dataclass(frozen=True)
class MARConfig:
    """Shape of a MAR.

    Attributes:
        dim: transformer width C.
        encoder_depth, decoder_depth: number of blocks.
        heads: attention heads.
        buffer: class rows in front of the tokens.
        tokens: tokens of a picture (a square grid).
        channels: channels per token (latent channels times patch area).
        classes: number of class labels; 0 for none.
        head_depth, head_width: residual blocks and width of the diffusion head.
    """

    dim: int
    encoder_depth: int
    decoder_depth: int
    heads: int
    buffer: int
    tokens: int
    channels: int
    classes: int
    head_depth: int
    head_width: int

    @property
    def grid(self) -> int:
        """Tokens along one side of the picture."""
        return math.isqrt(self.tokens)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], heads: int | None = None) -> MARConfig:
        """Read the shape off official parameter names.

        Args:
            state: official parameter names to tensors.
            heads: attention heads; None looks the width up in :data:`OFFICIAL_HEADS`.

        Raises:
            KeyError: the state dict is not a MAR's.
            ValueError: the head count is unknown or does not divide the width, or the tokens are no square.
        """
        dim = state["class_emb.weight"].shape[1]
        tokens = state["diffusion_pos_embed_learned"].shape[1]
        heads = heads or OFFICIAL_HEADS.get(dim)
        if heads is None:
            raise ValueError(f"a MAR of width {dim} is none of the official sizes; give its metadata an entry 'heads'")
        if dim % heads:
            raise ValueError(f"heads: {heads} does not divide the width {dim}")
        if math.isqrt(tokens) ** 2 != tokens:
            raise ValueError(f"{tokens} tokens are no square grid")
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


class Attention(nn.Module):
    """Multi-head self-attention in two halves, so that a cache can be applied between them."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = Linear(dim, 3 * dim, bias=True), Linear(dim, dim, bias=True)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, C] to query, key, value, each [B, heads, N, C / heads]."""
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Attention output [B, Nq, C] of queries over keys and values, projected.

        ``key_mask`` bool [B, N]: True for keys that may be attended; None for all.
        """
        out = F.scaled_dot_product_attention(q, k, v, None if key_mask is None else key_mask[:, None, None])
        return self.proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.attend(*self.project(x), key_mask)


class _MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(dim, 4 * dim, bias=True), Linear(4 * dim, dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm ViT block: exact GELU, no layer scale, no query/key norm."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), _MLP(dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), key_mask)
        return x + self.mlp(self.norm2(x))

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """The block's output at rows ``index`` [B, M] only; keys and values come from all rows of x [B, N, C]."""
        q, k, v = self.attn.project(self.norm1(x))
        at = index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        y = pick(x, index) + self.attn.attend(q.gather(2, at), k, v)
        return y + self.mlp(self.norm2(y))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [B, M] of x [B, N, C] as [B, M, C]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


class _DiffusionLoss(nn.Module):
    """Gives the head its official parameter names, ``diffloss.net``."""

    def __init__(self, net: DiffusionHead):
        super().__init__()
        self.net = net


class MAR(Regional):
    """Masked autoregressive transformer over continuous tokens, with its diffusion head."""

    def __init__(self, config: MARConfig):
        super().__init__()
        c = self.config = config
        if c.classes:
            self.class_emb = nn.Embedding(c.classes, c.dim)
        self.fake_latent = nn.Parameter(torch.empty(1, c.dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.dim))
        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, c.buffer + c.tokens, c.dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, c.buffer + c.tokens, c.dim))
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, c.tokens, c.dim))
        self.z_proj, self.z_proj_ln = Linear(c.channels, c.dim, bias=True), nn.LayerNorm(c.dim, eps=1e-6)
        self.encoder_blocks = nn.ModuleList(Block(c.dim, c.heads) for _ in range(c.encoder_depth))
        self.encoder_norm = nn.LayerNorm(c.dim, eps=1e-6)
        self.decoder_embed = Linear(c.dim, c.dim, bias=True)
        self.decoder_blocks = nn.ModuleList(Block(c.dim, c.heads) for _ in range(c.decoder_depth))
        self.decoder_norm = nn.LayerNorm(c.dim, eps=1e-6)
        self.diffloss = _DiffusionLoss(DiffusionHead(c.channels, c.head_width, c.head_depth, c.dim))

    @property
    def head(self) -> DiffusionHead:
        return self.diffloss.net

    def class_rows(self, labels: Tensor | None, batch: int) -> Tensor:
        """Class vectors [B, C]: of ``labels`` int64 [B], or the null class of guidance for None."""
        return self.fake_latent.expand(batch, -1) if labels is None else self.class_emb(labels)

    def embed_known(self, tokens: Tensor, known: Tensor, class_rows: Tensor) -> Tensor:
        """The encoder's input [B, buffer + K, C].

        Args:
            tokens: [B, L, channels]; only the known positions are read.
            known: int64 [B, K], positions already decided.
            class_rows: [B, C].
        """
        b, buffer = tokens.shape[0], self.config.buffer
        rows = class_rows.to(self.z_proj.weight.dtype)[:, None].expand(-1, buffer, -1)
        x = torch.cat([rows, self.z_proj(pick(tokens, known).to(self.z_proj.weight.dtype))], dim=1)
        at = torch.cat([torch.arange(buffer, device=known.device).expand(b, -1), known + buffer], dim=1)
        return self.z_proj_ln(x + pick(self.encoder_pos_embed_learned.expand(b, -1, -1), at))

    def encode(self, tokens: Tensor, known: Tensor, class_rows: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Encoder output [B, buffer + K, C]; arguments as :meth:`embed_known`.

        ``padding_mask`` bool [B, K], True for known tokens and False for padding, lets images have different numbers of known
        tokens. None for no padding.
        """
        x, key_mask = self.embed_known(tokens, known, class_rows), None
        if padding_mask is not None:
            key_mask = F.pad(padding_mask, (self.config.buffer, 0), value=True)
        run = self.region(Block.forward)
        for block in self.encoder_blocks:
            x = run(block, x, key_mask)
        return self.encoder_norm(x)

    def canvas(self, encoded: Tensor, known: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The decoder's input [B, buffer + L, C]: encoded rows at their places, mask tokens elsewhere."""
        b, buffer, length = known.shape[0], self.config.buffer, self.config.tokens
        x = self.decoder_embed(encoded)
        full = self.mask_token.to(x.dtype).expand(b, buffer + length + (padding_mask is not None), -1).clone()
        full[:, :buffer] = x[:, :buffer]
        # Padding goes to a row that is cut off.
        at = known if padding_mask is None else torch.where(padding_mask, known, length)
        full.scatter_(1, (at + buffer)[..., None].expand(-1, -1, x.shape[2]), x[:, buffer:])
        return full[:, : buffer + length] + self.decoder_pos_embed_learned

    def decode(
        self, encoded: Tensor, known: Tensor, wanted: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Conditions z for the head.

        Args:
            encoded: [B, buffer + K, C] from :meth:`encode`.
            known: int64 [B, K], the same positions.
            wanted: int64 [B, M], positions whose z is needed; None for all L. The last block then computes those only.
            padding_mask: which of ``known`` are not padding, as in :meth:`encode`.

        Returns:
            z [B, M, C] (or [B, L, C]).
        """
        x = self.canvas(encoded, known, padding_mask)
        *blocks, last = self.decoder_blocks
        run = self.region(Block.forward)
        for block in blocks:
            x = run(block, x)
        place = self.diffusion_pos_embed_learned
        if wanted is None:
            return self.decoder_norm(run(last, x)[:, self.config.buffer :]) + place
        z = self.decoder_norm(last.rows(x, wanted + self.config.buffer))
        return z + pick(place.expand(len(wanted), -1, -1), wanted)


@dataclass(frozen=True, eq=False)
class MARModel:
    """A MAR and the metadata of its file or catalogue entry.

    Attributes:
        net: the network in eval mode; weights in the compute dtype, the head's last layer in fp32.
        name: display name for messages and reports.
        latent_scale: tokens = latent scale x decoder latents; 0.2325 for the official KL-16, 1 for the demo.
        t_max: highest diffusion timestep this checkpoint should start from; 999 officially.
        patch: latent positions a token covers per side; 1 in every official file.
        label_set: name of the label list ("imagenet-1k", "picture-book"), or "" if unknown.
        max_beta: largest beta of the diffusion the head was trained with; 0.999 for every MAR.
        condition: kind of condition it is sampled with.
    """

    net: MAR
    name: str
    latent_scale: float = 0.2325
    t_max: int = 999
    patch: int = 1
    label_set: str = ""
    max_beta: float = 0.999
    condition: ClassVar[str] = "class"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"MAR": self.net}

    def weights(self) -> dict[str, int]:
        """Bytes of the weights by part."""
        return {n: sum(p.numel() * p.element_size() for p in part.parameters()) for n, part in self.parts.items()}

    @property
    def note(self) -> str:
        """A remark for the report, or ""."""
        return ""

    def working_bytes(self, rows: int) -> dict[str, int]:
        """Upper estimate of the activations of one pass by part, for ``rows`` rows of the decoder over the batch and both branches."""
        return {"MAR": 16 * rows * self.net.config.dim * next(self.net.parameters()).element_size()}

    def prompt_bytes(self, tokens: int) -> int:
        """Memory of the keys and values of that many rows of a language model; 0 without one."""
        return 0

    def first_timestep(self, diffusion_steps: int) -> int:
        """Highest timestep of a table of that many diffusion steps, where the settings do not choose one."""
        return self.t_max

    def to_latents(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L, channels] to decoder latents [B, C, H, W], fp32."""
        g, p = self.net.config.grid, self.patch
        x = tokens.float().view(len(tokens), g, g, -1, p, p).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(tokens), -1, g * p, g * p) / self.latent_scale

    def to_tokens(self, latents: Tensor) -> Tensor:
        """Decoder latents [B, C, H, W] to tokens [B, L, channels]: the inverse of :meth:`to_latents`."""
        g, p = self.net.config.grid, self.patch
        x = latents.view(len(latents), -1, g, p, g, p).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(len(latents), g * g, -1) * self.latent_scale


def initialise(net: MAR) -> MAR:
    """Official initialisation: Xavier matrices, std 0.02 embeddings, adaLN and the last layer zero."""
    for m in net.modules():
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)
    for name, p in net.named_parameters():
        if (
            "embed_learned" in name
            or name in ("class_emb.weight", "fake_latent", "mask_token")
            or "time_embed.mlp" in name
            and p.ndim == 2
        ):
            nn.init.normal_(p, std=0.02)
        elif "adaLN_modulation" in name or "final_layer.linear" in name:
            nn.init.zeros_(p)
    return net
