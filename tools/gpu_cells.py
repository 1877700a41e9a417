"""The cells of gpu_hour.py: samplers, models of official sizes with random weights, and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..bench.sizes import DTOK_SIZES, PAR_SPECIAL, SIZES, TOKEN_SIZES, official, official_gpt
from ..model_loaders.networks import gpt, mar
from ..model_loaders.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from ..model_loaders.networks.gpt import GPT, TokenModel
from ..model_loaders.networks.mar import MAR, MARModel
from ..model_loaders.networks.speed import COMPILE, GRAPHS, KERNELS, PLAIN, choose
from ..samplers.conditioning import AnyCondition, FeatureCondition, from_ids
from ..samplers.registry import SAMPLERS
from ..samplers.settings import make
from ..samplers.tokens.upsampling import PixelUpSampling

# Tar's de-tokenizer for 1,024 and 512 pixels: tokens a side. Semantic codes of its condition and their width.
_DTOK_GRIDS, _CODES, _WIDTH = {"AR-DTok-1024": 64, "AR-DTok-512": 32}, 169, 1152
_MAR_SETS = {"ar_steps": 64, "diffusion_steps": 100, "cfg": 3.0}
# What forces an acceptance rate, see gpu_hour.py.
_FORCED: Mapping[str, Mapping[str, Any]] = {
    "fasthybrid": {"threshold": -1.0},
    "fasthybrid+lazymar": {"threshold": -1.0},
    "mulosd": {"acceptance_target": 0.7},
}
UNFORCED = ("cspd", "jacobi", "lantern")


@dataclass(frozen=True)
class Cell:
    """One measurement: a sampler of the registry on a model of an official size."""

    model: str
    sampler: str
    batch: int = 1
    dtype: str = "bf16"
    speed: str = PLAIN
    sets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> tuple[str, int, str, str]:
        """What its ratio is relative to: the plain sampler with the same model, batch, dtype and speed."""
        return self.model.replace("PAR", "LlamaGen"), self.batch, self.dtype, self.speed


def cells() -> list[Cell]:
    """All cells, the most important ones first; cells of one model are neighbours."""
    out = []
    for size in ("MAR-B", "MAR-H"):
        names = ("mar", "fasthybrid", "lazymar", "fasthybrid+lazymar", *(("cspd",) if size == "MAR-H" else ()))
        out += [Cell(size, name, speed=speed) for name in names for speed in (PLAIN, COMPILE, KERNELS, GRAPHS)]
    for size, names in (("LlamaGen-XL", ("llamagen", "zipar", "jacobi", "lantern")), ("LlamaGen-XXL", ("llamagen",))):
        out += [Cell(size, name, speed=speed) for name in names for speed in _speeds(name)]
    out += [Cell("PAR-XL", "par", speed=speed) for speed in _speeds("par")]
    out += [
        Cell("AR-DTok-1024", name, speed=speed) for name in ("llamagen", "zipar", "mulosd") for speed in _speeds(name)
    ]
    out += [Cell("MAR-B", name, batch) for batch in (8, 64) for name in ("mar", "fasthybrid", "lazymar")]
    out += [Cell("LlamaGen-XL", name, batch) for batch in (8, 64) for name in ("llamagen", "zipar")]
    out += [Cell("PAR-XL", "par", batch) for batch in (8, 64)]
    out += [Cell("MAR-B", "mar", dtype="fp32"), Cell("LlamaGen-XL", "llamagen", dtype="fp32")]
    return out


def _speeds(sampler: str) -> tuple[str, ...]:
    """How a token sampler is measured: nothing is captured of those that draft."""
    return (PLAIN, COMPILE) if sampler in ("jacobi", "lantern", "mulosd") else (PLAIN, COMPILE, GRAPHS)


# ------------------------------------------------------------------------------------------------ models


def build(name: str, dtype: str, device: torch.device, dry: bool = False) -> MARModel | TokenModel:
    """A model with random weights from a fixed seed; ``dry``: of a tiny size with the same parts."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        if name in SIZES:
            config = official(name)
            if dry:
                config = replace(config, dim=24, encoder_depth=2, decoder_depth=2, heads=2, buffer=2, tokens=16)
                config = replace(config, channels=4, classes=8, head_depth=6, head_width=16)
            net = mar.initialise(MAR(config)).eval().requires_grad_(False)
            for parameter in net.head.parameters():  # zero at first: every condition would have the same tokens
                if parameter.ndim == 2 and not parameter.any():
                    parameter.normal_(std=0.1 if dry else 0.02)
            net = net.to(device, kind)
            net.head.final_layer.linear.float()
            return MARModel(net, name, t_max=950)
        tokens = _gpt(name, dry).eval().requires_grad_(False)
        tokens.output.weight.normal_(std=0.5 if dry else 0.02)  # zero at first: all tokens would be equally likely
        grid = _DTOK_GRIDS.get(name) or TOKEN_SIZES[name.replace("PAR", "LlamaGen")][3]
        if dry:
            grid = 8 if name == "AR-DTok-1024" else 4
        return TokenModel(tokens.to(device, kind), name, grid)


def _gpt(name: str, dry: bool) -> GPT:
    if name in _DTOK_GRIDS:
        dim, depth, heads = DTOK_SIZES["AR-DTok-LP"]
        config = replace(official_gpt("LlamaGen-XL"), dim=dim, depth=depth, heads=heads, kv_heads=heads)
        rows = (6 if dry else _CODES) + (64 if dry else _DTOK_GRIDS[name] ** 2)
        config = replace(config, condition="features", condition_size=12 if dry else _WIDTH, absolute=rows)
    else:
        config = official_gpt(name.replace("PAR", "LlamaGen"), PAR_SPECIAL if name.startswith("PAR") else 0)
    if dry:
        config = replace(config, dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=32)
        config = replace(config, condition_size=8) if config.condition == "class" else config
    return gpt.initialise(GPT(config))


def _vq(device: torch.device, dry: bool) -> VQModel:
    """A random VQ tokenizer of LlamaGen's size."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = VQConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=256, codes=16384)
        if dry:
            config = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=32, code_channels=4, groups=4)
        return VQModel(VQAutoencoder(config).eval().requires_grad_(False).to(device), "random VQ")


def extras(cell: Cell, device: torch.device, dry: bool) -> dict[str, Any]:
    """Draft model and tokenizer of a sampler."""
    entry, out = SAMPLERS[cell.sampler], dict[str, Any]()
    if entry.needs_draft:
        name = {"MAR-H": "MAR-B", "AR-DTok-1024": "AR-DTok-512"}.get(cell.model, cell.model)
        out["draft"] = build(name, cell.dtype, device, dry)
        choose(out["draft"].net, cell.speed, device)
    if entry.needs_codes:
        vq = _vq(device, dry)
        out[entry.needs_codes] = PixelUpSampling(vq) if entry.needs_codes == "up_sampler" else vq
    return out


def condition_of(model: MARModel | TokenModel, batch: int) -> AnyCondition:
    """Consecutive classes, or the same features for every image."""
    c: Any = model.net.config
    if isinstance(model, MARModel) or c.condition == "class":
        return from_ids([i % 8 for i in range(batch)])
    device = next(model.net.parameters()).device
    rows = torch.randn(c.absolute - model.tokens, c.condition_size, generator=torch.Generator().manual_seed(0))
    return FeatureCondition((rows.to(device),) * batch, ("",) * batch)


def settings_of(cell: Cell, dry: bool) -> Any:
    """Published settings, with the acceptance forced."""
    kind = SAMPLERS[cell.sampler].settings
    sets: dict[str, Any] = dict(_MAR_SETS) if cell.model in SIZES else {"cfg": 4.0}
    if dry and cell.model in SIZES:
        sets |= {"ar_steps": 6, "diffusion_steps": 4}
    return make(kind, {**sets, **_FORCED.get(cell.sampler, {}), **cell.sets})
