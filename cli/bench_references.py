"""Reference implementations for ``bench --against``: each is built from a checkout, with the random weights of ours.

Nothing is copied from a checkout and nothing but its modules is needed. What they import without using it for sampling, or
what is not installed, is replaced while they are imported (:data:`STANDINS`); calls that move tensors to a GPU have no effect.
Both programs take the likeliest token (token models), or start all tokens from the same noise and add none afterwards (MAR),
when their results are compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.networks.gpt import GPT, GPTConfig, TokenModel
from ..model_loaders.networks.gpt import initialise as initialise_gpt
from ..model_loaders.networks.mar import MARModel
from ..samplers.conditioning import FeatureCondition, from_ids
from ..samplers.driver import finish
from ..samplers.noise import PairedNoise
from ..samplers.registry import LLAMAGEN, TAR, find
from ..samplers.registry import MAR as MAR_FAMILY
from ..samplers.settings import make
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.par import par_schedule

# AR-DTok: features of a picture and their width, image tokens along one side.
FEATURES, FEATURE_WIDTH, DTOK_GRID = 729, 1152, 16


@dataclass(frozen=True, eq=False)
class Pair:
    """One kind of work, done by both programs with the same weights.

    Attributes:
        work: what is drawn, for the table.
        model: our model.
        ours: draws a batch with the given seed; returns our report.
        theirs: the same work in the reference implementation.
        compare: the largest difference of the two results, for a run that both do alike; None: not comparable.
        tolerance: the largest difference that counts as equal.
    """

    work: str
    model: Ready
    ours: Callable[[int], Any]
    theirs: Callable[[], Any]
    compare: Callable[[], float] | None
    tolerance: float = 0.0


# ------------------------------------------------------------------------------------------------ importing a checkout


class _Block(nn.Module):
    """timm's ViT block, which MAR imports: the same parameters and the same PyTorch calls."""

    class _Attention(nn.Module):
        def __init__(self, dim: int, heads: int):
            super().__init__()
            self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))

    class _MLP(nn.Module):
        def __init__(self, dim: int, hidden: int):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.gelu(self.fc1(x)))

    def __init__(self, dim: int, heads: int, mlp_ratio: float = 4.0, norm_layer: Any = nn.LayerNorm, **_: Any):
        super().__init__()
        self.norm1, self.attn = norm_layer(dim), self._Attention(dim, heads)
        self.norm2, self.mlp = norm_layer(dim), self._MLP(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Mlp(_Block._MLP):
    def __init__(self, in_features: int, hidden_features: int, **_: Any):
        super().__init__(in_features, hidden_features)


class _Unused:
    """Stands in for what sampling does not use."""

    def __init__(self, *_: Any, **__: Any):
        pass


# Modules that a checkout imports, and their attributes here.
STANDINS: Mapping[str, Mapping[str, Any]] = {
    "tqdm": {"tqdm": lambda items, *_, **__: items},
    "scipy": {},
    "scipy.stats": {"truncnorm": _Unused},  # the training's mask ratio
    "timm": {},
    "timm.layers": {"Mlp": _Mlp, "DropPath": _Unused, "use_fused_attn": lambda: True},
    "timm.models": {},
    "timm.models.vision_transformer": {"Block": _Block},
    "einops": {"rearrange": _Unused},  # the quantizer's training
    # Other parts of Tar's package, which its __init__ imports and AR-DTok does not use.
    "tok": {},
    "tok.utils": {"ScalingLayer": _Unused},
}


@contextmanager
def checkout(root: Path, package: str = "") -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of a checkout by name; they are forgotten by the interpreter afterwards.

    Args:
        root: first entry of the import path.
        package: a package of the checkout whose ``__init__`` is not run.
    """
    importlib.import_module(
        "torch._inductor.config"
    )  # imported by most checkouts; before the stand-ins, which it would see
    before = dict(sys.modules)
    for name in [n for n in sys.modules if n.split(".")[0] in _LOCAL]:
        del sys.modules[name]
    for name, attributes in STANDINS.items():
        if name.split(".")[0] == "tok" and not package:
            continue
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(attributes)
        module.__path__ = [str(root / package)] if name == package else []  # type: ignore[attr-defined]
        sys.modules[name] = module
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module
    except ImportError as e:
        raise UserError(f"against: {root} cannot be imported: {e}.") from e
    finally:
        sys.path.remove(str(root))
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in _LOCAL or name in STANDINS:
                del sys.modules[name]
        sys.modules.update(before)


# Top-level packages of the checkouts.
_LOCAL = ("models", "diffusion", "util", "utils", "autoregressive", "tok")


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Calls that move a tensor to a GPU leave it where it is."""
    original = Tensor.cuda
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.cuda = original  # type: ignore[method-assign]


def _load(theirs: nn.Module, ours: nn.Module, unused: tuple[str, ...] = ()) -> nn.Module:
    """Give the reference our weights; every parameter of either must exist in the other, except ``unused`` ones of theirs."""
    found = theirs.load_state_dict(ours.state_dict(), strict=False)
    missing = [k for k in found.missing_keys if k not in unused]
    if missing or found.unexpected_keys:
        raise UserError(f"against: the reference's weights differ from ours: {(missing + found.unexpected_keys)[0]}.")
    return theirs.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------ MAR


class _OneNoise:
    """Noise for a comparison: every token starts from the same numbers, and later noise is zero."""

    def __init__(self, orders: Tensor, channels: int):
        self._orders = orders
        self.row = torch.randn(channels, generator=torch.Generator().manual_seed(1))

    def orders(self, tokens: int) -> Tensor:
        return self._orders

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self.row[:channels].expand(len(self._orders), tokens, -1)

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return torch.zeros(len(self._orders), count, tokens, channels)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """PyTorch's own normal numbers are this noise."""
        originals = torch.randn, torch.randn_like
        torch.randn = lambda *size, **_: self.row.expand(*size)  # type: ignore[assignment]
        torch.randn_like = lambda x, **_: torch.zeros_like(x)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.randn, torch.randn_like = originals  # type: ignore[assignment]


def mar(root: Path, model: MARModel, batch: int, sets: Mapping[str, str], lazy: bool = False) -> Pair:
    """LTH14/mar, or feihongyan1/LazyMAR. LazyMAR's selection of rows is compared by ``verify`` and not here."""
    entry, c = find("lazymar" if lazy else "mar"), model.net.config
    settings: Any = make(entry.settings, {"t_max": "999", **sets})
    with torch.no_grad():  # the initial zeros would leave little to compare
        generator = torch.Generator().manual_seed(2)
        for name, p in model.net.named_parameters():
            if "adaLN_modulation" in name or "final_layer.linear" in name:
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    with checkout(root) as load:
        module = load("models.mar_cache" if lazy else "models.mar")
    labels = torch.arange(batch) % c.classes

    def reference(steps: int) -> Any:
        made = module.MAR(
            img_size=16 * c.grid,
            encoder_embed_dim=c.dim,
            encoder_depth=c.encoder_depth,
            encoder_num_heads=c.heads,
            decoder_embed_dim=c.dim,
            decoder_depth=c.decoder_depth,
            decoder_num_heads=c.heads,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            vae_embed_dim=c.channels,
            class_num=c.classes,
            buffer_size=c.buffer,
            diffloss_d=c.head_depth,
            diffloss_w=c.head_width,
            num_sampling_steps=str(steps),
            **({"lazy_mar": True} if lazy else {}),
        )
        return _load(made, model.net)

    def theirs(net: Any, s: Any) -> Tensor:
        with torch.no_grad(), _on_cpu():
            extra = {"args": SimpleNamespace(device="cpu", lazy_mar=True)} if lazy else {}
            return net.sample_tokens(batch, s.ar_steps, s.cfg, s.cfg_schedule, labels, s.temperature, **extra)

    def ours(s: Any, noise: Any) -> Any:
        return finish(entry.run(model, from_ids(labels.tolist()), s, noise, 0))

    def compare() -> float:
        short = replace(settings, ar_steps=min(4, settings.ar_steps), diffusion_steps=25)
        noise = _OneNoise(PairedNoise(0, range(batch)).orders(c.tokens), c.channels)
        net = reference(25)
        net.sample_orders = lambda bsz: noise.orders(c.tokens)
        with noise.drawn():
            want = theirs(net, short)
        got = ours(short, noise).latents * model.latent_scale
        return float((got - want).abs().max() / want.abs().max())

    whole = reference(settings.diffusion_steps)
    return Pair(
        f"{model.name.split(',')[0]}, {settings.ar_steps} x {settings.diffusion_steps}, batch {batch}",
        Ready(MAR_FAMILY, model),
        lambda seed: ours(settings, PairedNoise(seed, range(batch))).report,
        lambda: theirs(whole, settings),
        None if lazy else compare,
        1e-3,
    )


# ------------------------------------------------------------------------------------------------ token models


def _greedy(name: str, sets: Mapping[str, str]) -> Any:
    published = {"mask_undecoded": "false"} if name == "zipar" else {}
    return make(find(name).settings, {"cfg": "4", "top_k": "0", "temperature": "0", **published, **sets})


def _tokens(
    name: str, model: Ready, condition: Any, sets: Mapping[str, str], theirs: Callable[[Any], Tensor], order: Tensor
) -> Pair:
    """A pair of token samplers. ``order``: our cell of each of their tokens, int64 [N]."""
    settings, entry, batch = _greedy(name, sets), find(name), len(condition)

    def ours(seed: int) -> Any:
        return finish(entry.run(model.model, condition, settings, PairedDraws(seed, range(batch)), seed))

    def reference() -> Tensor:
        with torch.no_grad(), _on_cpu():
            return theirs(settings)

    def compare() -> float:
        return float((ours(0).codes.flatten(1)[:, order] != reference()).float().mean())

    tokens: Any = model.model
    work = f"{tokens.name.split(',')[0]}, {tokens.grid} x {tokens.grid}, batch {batch}"
    return Pair(work, model, lambda seed: ours(seed).report, reference, compare)


def llamagen(
    root: Path, model: TokenModel, batch: int, sets: Mapping[str, str], name: str = "llamagen", script: str = "generate"
) -> Pair:
    """FoundationVision/LlamaGen; with other arguments, the forks of it that are PAR and ZipAR."""
    c = model.net.config
    with checkout(root) as load:
        networks = load("autoregressive.models.gpt")
        generate = load(f"autoregressive.models.{script}").generate
    extra = {"spe_token_num": c.special, "ar_token_num": c.regions} if c.special else {}
    arguments = networks.ModelArgs(
        dim=c.dim,
        n_layer=c.depth,
        n_head=c.heads,
        vocab_size=c.vocab,
        num_classes=c.condition_size,
        block_size=model.tokens,
        **extra,
    )
    net: Any = _load(networks.Transformer(arguments), model.net)
    labels = torch.arange(batch) % c.condition_size
    order = torch.arange(model.tokens)
    if c.special:
        order = torch.tensor([cell for at in par_schedule(model.grid, c.regions).passes for cell in at.cells])
        extra = {"ar_token_num": c.regions, "spe_token_num": c.special}

    def theirs(settings: Any) -> Tensor:
        if name == "zipar":
            net.zipar_window_size = settings.window
            net.reset_zipar()
        net.start = True
        return generate(net, labels, model.tokens, cfg_scale=settings.cfg, sample_logits=False, **extra)

    return _tokens(name, Ready(LLAMAGEN, model), from_ids(labels.tolist()), sets, theirs, order)


def tar(root: Path, size: str, batch: int, sets: Mapping[str, str]) -> Pair:
    """csuhan/Tar: its de-tokenizer AR-DTok."""
    dim, depth, heads = DTOK_SIZES[size]
    count = DTOK_GRID**2
    config = GPTConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        hidden=-(-(8 * dim // 3) // 256) * 256,
        vocab=16384,
        condition="features",
        condition_size=FEATURE_WIDTH,
        absolute=count + FEATURES - 1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = initialise_gpt(GPT(config)).eval().requires_grad_(False)
        ours.output.weight.normal_(std=0.02)
        features = torch.randn(FEATURES, FEATURE_WIDTH)
    with checkout(root, "tok") as load:
        networks = load("tok.ar_dtok.ar_model")
    arguments = networks.ModelArgs(
        dim=dim,
        n_layer=depth,
        n_head=heads,
        vocab_size=config.vocab,
        model_type="clip_cond",
        cond_dim=FEATURE_WIDTH,
        cls_token_num=FEATURES,
        max_seq_len=count,
    )
    net: Any = _load(networks.ARModel(arguments), ours)
    given = features.expand(batch, -1, -1)

    def theirs(settings: Any) -> Tensor:
        with net.sampling():
            return networks.ar_generate(net, given, count, cfg_scale=settings.cfg, sample_logits=False)

    model = Ready(TAR, TokenModel(ours, f"{size}, random weights", DTOK_GRID))
    condition = FeatureCondition((features,) * batch, ("",) * batch)
    return _tokens("tar", model, condition, sets, theirs, torch.arange(count))


# ------------------------------------------------------------------------------------------------ which checkout it is

DTOK_SIZES = {"AR-DTok-B": (768, 12, 12), "AR-DTok-LP": (1280, 30, 20)}
# Name, a file that identifies it, and its folder inside the checkout.
_KNOWN = (
    ("lazymar", "models/mar_cache.py", ""),
    ("mar", "models/mar.py", ""),
    ("zipar", "LlamaGen-ZipAR/autoregressive/models/generate_zipar.py", "LlamaGen-ZipAR"),
    ("llamagen", "autoregressive/models/generate.py", ""),
    ("tar", "tok/ar_dtok/ar_model.py", ""),
)


def identify(folder: Path) -> tuple[str, Path]:
    """Which reference a checkout holds ("mar", "lazymar", "llamagen", "par", "zipar" or "tar"), and where its modules are.

    Raises:
        UserError: none of them.
    """
    if (folder / "spec_decode").is_dir():
        raise UserError(
            f"against: {folder} is CSpD, which bench cannot time yet; give a checkout of another reference."
        )
    for name, path, inside in _KNOWN:
        if (folder / path).is_file():
            if name == "llamagen" and "spe_tok" in (folder / "autoregressive/models/gpt.py").read_text(
                encoding="utf-8"
            ):
                name = "par"
            return name, folder / inside
    raise UserError(f"against: {folder} is no checkout of MAR, LazyMAR, LlamaGen, PAR, ZipAR or Tar.")


def pair(
    name: str, root: Path, model: MARModel | TokenModel | None, size: str, batch: int, sets: Mapping[str, str]
) -> Pair:
    """The work of a reference, see :func:`identify`; ``model`` has the random weights, except for Tar."""
    if name == "tar":
        return tar(root, size, batch, sets)
    if isinstance(model, MARModel):
        return mar(root, model, batch, sets, lazy=name == "lazymar")
    assert isinstance(model, TokenModel)
    return llamagen(root, model, batch, sets, name, "generate_zipar" if name == "zipar" else "generate")
