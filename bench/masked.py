"""MAR, LazyMAR and CSpD for the command ``against``. MAR's results are compared: both programs start all tokens from the same noise and
add none afterwards. LazyMAR and CSpD are compared with recorded results by ``verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..assembly import Ready
from ..model_loaders.networks.mar import MAR, MARModel
from ..model_loaders.networks.mar import initialise as initialise_mar
from ..samplers.conditioning import from_ids
from ..samplers.driver import finish
from ..samplers.noise import PairedNoise
from ..samplers.registry import MAR as MAR_FAMILY
from ..samplers.registry import find
from ..samplers.settings import make
from .checkouts import Pair, checkout, load_weights, on_cpu


def _fill(model: MARModel) -> None:
    """Random numbers in place of the initial zeros, which would leave little to compare."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.net.named_parameters():
            if "adaLN_modulation" in name or "final_layer.linear" in name:
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))


def _reference(module: ModuleType, model: MARModel, steps: int, **extra: Any) -> Any:
    """The reference's network with our weights, for ``steps`` diffusion steps."""
    c = model.net.config
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
        **extra,
    )
    return load_weights(made, model.net)


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


def _pair(
    work: str,
    model: MARModel,
    settings: Any,
    batch: int,
    ours: Callable[[Any, Any], Any],
    theirs: Callable[[], Any],
    compare: Callable[[], float] | None = None,
) -> Pair:
    """The pair of a sampler and its reference."""
    text = f"{work}, {settings.ar_steps} x {settings.diffusion_steps}, batch {batch}"

    def seeded(seed: int) -> Any:
        return ours(settings, PairedNoise(seed, range(batch))).report

    return Pair(text, Ready(MAR_FAMILY, model), seeded, theirs, compare, 1e-3)


def mar(root: Path, model: MARModel, batch: int, sets: Mapping[str, str], lazy: bool = False) -> Pair:
    """LTH14/mar, or feihongyan1/LazyMAR."""
    entry, c = find("lazymar" if lazy else "mar"), model.net.config
    settings: Any = make(entry.settings, {"t_max": "999", **sets})
    _fill(model)
    with checkout(root) as load:
        module = load("models.mar_cache" if lazy else "models.mar")
    labels = torch.arange(batch) % c.classes
    more = {"args": SimpleNamespace(device="cpu", lazy_mar=True)} if lazy else {}

    def theirs(net: Any, s: Any) -> Tensor:
        with torch.no_grad(), on_cpu():
            return net.sample_tokens(batch, s.ar_steps, s.cfg, s.cfg_schedule, labels, s.temperature, **more)

    def ours(s: Any, noise: Any) -> Any:
        return finish(entry.run(model, from_ids(labels.tolist()), s, noise, 0))

    def compare() -> float:
        short = replace(settings, ar_steps=min(4, settings.ar_steps), diffusion_steps=25)
        noise = _OneNoise(PairedNoise(0, range(batch)).orders(c.tokens), c.channels)
        net = _reference(module, model, 25)
        net.sample_orders = lambda bsz: noise.orders(c.tokens)
        with noise.drawn():
            want = theirs(net, short)
        got = ours(short, noise).latents * model.latent_scale
        return float((got - want).abs().max() / want.abs().max())

    net = _reference(module, model, settings.diffusion_steps, **({"lazy_mar": True} if lazy else {}))
    work = model.name.split(",")[0]
    return _pair(work, model, settings, batch, ours, lambda: theirs(net, settings), None if lazy else compare)


def cspd(root: Path, model: MARModel, batch: int, sets: Mapping[str, str]) -> Pair:
    """The published code of CSpD, with ``model`` as target and a random draft of half its depth. Ours is in the mode *published*."""
    c, entry = model.net.config, find("cspd")
    settings: Any = make(entry.settings, {"t_max": "999", "mode": "published", **sets})
    _fill(model)
    depths = {name: max(1, getattr(c, name) // 2) for name in ("encoder_depth", "decoder_depth", "head_depth")}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        small = initialise_mar(MAR(replace(c, **depths))).eval().requires_grad_(False)
    draft = replace(model, net=small, name="draft of half the depth, random weights")
    _fill(draft)
    with checkout(root) as load:
        module, runner = load("models.mar"), load("spec_decode.spec_decode_runner")
    labels = torch.arange(batch) % c.classes
    nets = [_reference(module, m, settings.diffusion_steps) for m in (draft, model)]

    def theirs() -> Tensor:
        s = settings
        with torch.no_grad(), on_cpu():
            both = runner.SpecDecodeRunner(*nets, s.inner_temperature or 42.0, s.prefill_ratio)
            return both.run(batch, s.ar_steps, s.draft_length, s.cfg_schedule, labels, s.temperature, s.cfg)

    def ours(s: Any, noise: Any) -> Any:
        return finish(entry.run(model, from_ids(labels.tolist()), s, noise, 0, draft=draft))

    work = f"CSpD, {model.name.split(',')[0]} and a draft of half its depth"
    return _pair(work, model, settings, batch, ours, theirs)
