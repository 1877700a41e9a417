"""Tiny models on sockets, and short runs of the sampler nodes."""

# ruff: noqa: E402 - the fake ComfyUI comes before the nodes, which import it
from dataclasses import replace
from functools import cache, partial
from typing import Any

import fake_comfy
import torch

fake_comfy.install()

from block_models import tiny_bitdance
from fastar_nodes.lab.training.initialise import initialise_mar
from fastar_nodes.networks.autoencoder import VQAutoencoder, VQModel
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig, BinaryModel
from fastar_nodes.networks.bitdance import BlockModel
from fastar_nodes.networks.llama import Llama, LlamaConfig, TokenModel
from fastar_nodes.networks.mar import MAR, MARConfig, MARModel
from fastar_nodes.networks.nextstep import NextStepModel
from fastar_nodes.networks.ta_tok import TATokModel
from fastar_nodes.nodes import conditioning, loaders, samplers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.nodes.vae import FastARVAE
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.settings import knobs
from graphs import WIDGETS, default
from nextstep_models import tiny_latents, tiny_nextstep
from qwen_reference import tiny_tar
from tar_files import DTOK, tiny_ta_tok
from tiny_files import GPT_SIZE, READER, VQ_SIZE
from torch import Tensor, nn

LABELS = from_ids([1, 2])
TEXTS = PromptCondition(("a red house", "An old boat by the sea"))
SHORT = {"steps": 4, "diffusion_steps": 4}
TEXT_SIZE = replace(GPT_SIZE, condition="text", condition_size=6, text_rows=7)
DRAWER = replace(DTOK, vocab=VQ_SIZE.codes)
NODES = {node.node_id: node for node in samplers.NODES if node is not samplers.LazyMARCache}


class TinyVAE(nn.Module):
    """Two latent channels, stride 4: encode and decode are averages and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def decode(self, z: Tensor) -> Tensor:
        x = torch.cat([z, z[:, :1]], dim=1) * self.scale
        return x.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = nn.functional.avg_pool2d(x, 4)[:, :2]
        return mean, torch.zeros_like(mean)


def a_vae(side: int = 16) -> FastARVAE:
    return FastARVAE(TinyVAE(), "tiny", 4, 2, 8, [(side, side)])


def a_mar(tokens: int = 16, classes: int = 10, label_set: str = "", file: Any = None) -> Loaded:
    """A MAR whose file recommends ``file``."""
    size = {"tokens": tokens, "channels": 2, "classes": classes, "head_depth": 1, "head_width": 16, "buffer": 2}
    net = initialise_mar(MAR(MARConfig(dim=16, encoder_depth=1, decoder_depth=2, heads=2, **size))).eval()
    return Loaded.of(MARModel(net, "tiny", latent_scale=0.5, label_set=label_set), a_vae(), recommended=file)


def random(net: nn.Module, seed: int = 0) -> Any:
    """The network with weights that depend on ``seed``."""
    g = torch.Generator().manual_seed(seed)
    for name, p in net.state_dict().items():
        scale, mean = 1.0 if "embed" in name else 0.3, 1.0 if p.ndim == 1 and "weight" in name else 0.0
        p.copy_(torch.randn(p.shape, generator=g) * scale + mean)
    return net.eval().requires_grad_(False)


def a_vq(model: TokenModel | None = None) -> FastARVAE:
    """The decoder of a model, of 4 x 4 tokens if none is given."""
    return loaders.make_vae(VQModel(random(VQAutoencoder(VQ_SIZE)), "tiny vq"), model or a_gpt().model)


def a_gpt(
    config: LlamaConfig = GPT_SIZE, grid: int = 4, label_set: str = "", special: int = 0, file: Any = None
) -> Loaded:
    """A LlamaGen; with 3 special tokens a PAR."""
    net = random(Llama(replace(config, special=special)))
    model = TokenModel(net, "tiny", grid, label_set=label_set)
    return Loaded.of(model, a_vq(model), recommended=file)


def a_block(model: BlockModel | None = None, file: Any = None) -> Loaded:
    """A BitDance with its decoder: one of 4 x 4 tokens of 2 x 2 pixels if none is given."""
    model = model or tiny_bitdance()
    levels = model.stride.bit_length()
    config = BinaryConfig(widths=(8,) * levels, blocks=1, z_channels=model.net.channels, groups=4)
    vae = loaders.make_vae(BinaryModel(random(BinaryAutoencoder(config)), "tiny bits"), model)
    return Loaded.of(model, vae, recommended=file)


def a_nextstep(model: NextStepModel | None = None, file: Any = None) -> Loaded:
    """A NextStep of 3 x 3 tokens with its autoencoder."""
    model = model or tiny_nextstep()
    return Loaded.of(model, loaders.make_vae(tiny_latents(), model), recommended=file)


def a_drawer(size: str = "large", seed: int = 0) -> Loaded:
    """A de-tokenizer of 6 x 6 or 3 x 3 tokens with its TA-Tok, as the loader makes it."""
    reader, grid = TATokModel(tiny_ta_tok(READER), "tiny ta-tok"), {"large": 6, "small": 3}[size]
    net = random(Llama(replace(DRAWER, absolute=16 + grid**2 - 1)), seed)
    model = TokenModel(net, f"tiny {size}", grid, ta_tok=reader)
    return Loaded.of(model, a_vq(model), {"ta_tok": Loaded.of(reader)})


@cache
def usual_prompt() -> Any:
    """Codes of Tar Prompt, drawn once: no test changes them."""
    return a_prompt(Loaded.of(tiny_tar()))


def a_prompt(tar: Any = None, **changes: Any) -> Any:
    """Codes of Tar Prompt."""
    if tar is None and not changes:
        return usual_prompt()
    given = {"tar": Loaded.of(tiny_tar()) if tar is None else tar, "text": "a red boat", "seed": 3, "images": 2}
    return conditioning.TarPrompt.execute(**dropped(conditioning.TarPrompt) | given | changes).result[0]


def dropped(node: Any, **changes: Any) -> dict[str, Any]:
    """Widget values of a node dropped on the canvas."""
    return {i.id: default(i) for i in node.define_schema().inputs if i.kind in WIDGETS} | changes


def node_of(sampler: str) -> Any:
    """The class of the node of a sampler."""
    found = [node for node in NODES.values() if node.sampler == sampler]
    assert found, f"NODES in nodes/samplers.py lacks a class of {sampler}; add one"
    return found[0]


def models(node: Any) -> dict[str, Loaded]:
    """Tiny models for the model sockets of a sampler."""
    if SAMPLERS[node.sampler].needs_up_sampler:
        return {"target": a_drawer(), "draft": a_drawer("small", 1)}
    special = 3 if node is samplers.PARSampler else 0
    tokens = partial(a_gpt, special=special)
    makers = {"masked": a_mar, "blocks": a_block, "tokens": tokens, "continuous": a_nextstep}
    return {name: makers[SAMPLERS[node.sampler].family.kind]() for name in node.models}


def subjects(sampler: str) -> Any:
    """Two entries of a condition that the tiny model of a sampler reads."""
    return LABELS if "class" in SAMPLERS[sampler].family.reads else TEXTS


def sample(node: Any, **changes: Any) -> tuple[Tensor, Report]:
    """Samples of the LATENT and report of a short run; what is
    not given is tiny. Settings are those of the preset custom.
    """
    known, preset = knobs(SAMPLERS[node.sampler].settings), changes.pop("preset", "custom")
    inputs = {"seed": 3, "preset": preset}
    if preset == "custom":
        inputs |= {k: v for k, v in SHORT.items() if k in known}
    if not {*node.models} <= {*changes}:
        inputs |= models(node)
    if "condition" not in changes:
        inputs["condition"] = a_prompt() if SAMPLERS[node.sampler].needs_up_sampler else subjects(node.sampler)
    latent, report = node.execute(**inputs | changes).result
    return latent["samples"], report


def a_report(sampler: str, seconds: float = 1.0, **settings: Any) -> Report:
    return Report(sampler, "m", settings, 1, 1, "cpu", seconds=seconds, counts={"transformer_passes": 3})
