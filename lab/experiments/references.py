"""Reference implementations for the command ``against``.

Each is built from a checkout, with the random weights of ours. Nothing is copied from a checkout. The packages that it
imports (timm, scipy, tqdm, einops) have to be installed. For Janus the checkout is the folder that contains the package
transformers.

When the results of token models are compared, both programs take the likeliest token. For MAR both start all tokens
from the same noise and add none afterwards. Results of LazyMAR and CSpD are compared with recorded ones by ``parity``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ...cli.options import whole
from ...errors import UserError
from ...model_loaders.catalogue import official
from ...model_loaders.janus import loader
from ...networks.janus import JanusModel, Template
from ...networks.llama import TokenModel
from ...networks.mar import MAR, MARModel
from ...runs.loading import Ready
from ...runs.registry import JANUS, LLAMAGEN, TAR, find
from ...samplers.conditioning import FeatureCondition, PromptCondition, from_ids
from ...samplers.engine import finish
from ...samplers.mar.cspd.published import PUBLISHED_RULE
from ...samplers.noise import PairedNoise
from ...samplers.settings import make
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.par import par_schedule
from ...samplers.tokens.schedule import Schedule
from ...samplers.tokens.zipar import ZipARSettings, windowed
from ..training.initialise import initialise_mar
from ..work import sizes


@dataclass(frozen=True, eq=False)
class Pair:
    """One kind of work, done by both programs with the same weights."""

    work: str  # what is drawn, for the table
    ours: Callable[[int], Any]  # draws a batch with the given seed
    theirs: Callable[[], Any]  # the same work in the reference implementation
    compare: Callable[[], float] | None  # the largest difference of the results, for a run that both do alike
    tolerance: float = 0.0  # the largest difference that counts as equal


# Top-level packages of the checkouts.
_LOCAL = ("models", "diffusion", "util", "utils", "autoregressive", "tok", "spec_decode")


@contextmanager
def checkout(root: Path, package: str = "") -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of a checkout by name, without running the ``__init__`` of ``package``.

    They are forgotten afterwards.
    """
    before = _local_modules()
    for name in before:
        del sys.modules[name]

    if package:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(root / package)]
    sys.path.insert(0, str(root))

    try:
        yield importlib.import_module
    except ImportError as e:
        raise UserError(f"against: {root} cannot be imported ({e}); install what the checkout needs.") from e
    finally:
        sys.path.remove(str(root))
        for name in _local_modules():
            del sys.modules[name]
        sys.modules.update(before)


def _local_modules() -> dict[str, ModuleType]:
    """Imported modules under the names of the checkouts' packages."""
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in _LOCAL}


def on_cpu() -> AbstractContextManager[Any]:
    """Calls that move a tensor to a GPU leave it where it is, and those that make one there make it on the CPU."""

    def make(factory: Callable[..., Tensor], *arguments: Any, device: Any = None, **named: Any) -> Tensor:
        return factory(*arguments, **named)

    names = ("zeros", "ones", "randn", "tensor")
    factories: dict[str, Any] = {name: partial(make, getattr(torch, name)) for name in names}
    found = ExitStack()
    found.enter_context(mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self))
    found.enter_context(mock.patch.multiple(torch, **factories))
    return found


def load_weights(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    """Give the reference our weights; every parameter of either must exist in the other."""
    found = theirs.load_state_dict(ours.state_dict(), strict=False)

    wrong = [*found.missing_keys, *found.unexpected_keys]
    if wrong:
        raise UserError(f"against: the reference's weights differ from ours: {wrong[0]}.")

    return theirs.eval().requires_grad_(False)


# AR-DTok: features of an image and their width, image tokens along one side.
FEATURES = 729
FEATURE_WIDTH = 1152
DTOK_GRID = 16


class ZipARWithBlanks(ZipARSettings):
    """ZipAR as its authors' code, which shows undecided cells as blanks."""

    def schedule(self, model: TokenModel) -> Schedule:
        return windowed(model.grid, self.window, unwritten_visible=True)


def _tokens(
    name: str, model: Ready, condition: Any, sets: Mapping[str, str], theirs: Callable[[Any], Tensor], order: Tensor
) -> Pair:
    """A pair of token samplers. ``order``: our cell of each of their tokens, int64 [N]."""
    entry = find(name)
    batch = len(condition)

    kind = ZipARWithBlanks if name == "zipar" else entry.settings
    settings: Any = make(kind, {"cfg": "4", "top_k": "0", "temperature": "0", **sets})

    def ours(seed: int) -> Any:
        return finish(entry.run(model.model, condition, settings, PairedDraws(seed, range(batch))))

    def reference() -> Tensor:
        with torch.no_grad(), on_cpu():
            return theirs(settings)

    def compare() -> float:
        differ = ours(0).latents.flatten(1)[:, order] != reference()
        return float(differ.float().mean())

    tokens: Any = model.model
    work = f"{tokens.name.split(',')[0]}, {tokens.grid} x {tokens.grid}, batch {batch}"
    if name == "zipar":  # decodes another sampler's model
        work = f"ZipAR, {work}"
    return Pair(work, lambda seed: ours(seed).report, reference, compare)


def llamagen(root: Path, size: str, batch: int, sets: Mapping[str, str], name: str) -> Pair:
    """FoundationVision/LlamaGen, or the forks of it that are PAR and ZipAR."""
    special = sizes.PAR_SPECIAL if name == "par" else 0
    model: Any = sizes.random_model(size, "fp32", torch.device("cpu"), special).model
    c = model.net.config

    with checkout(root) as load:
        networks = load("autoregressive.models.gpt")
        module = "generate_zipar" if name == "zipar" else "generate"
        generate = load(f"autoregressive.models.{module}").generate

    extra = {"spe_token_num": c.special, "ar_token_num": c.regions} if c.special else {}
    net = llamagen_network(networks, model, **extra)
    labels = torch.arange(batch) % c.condition_size

    # PAR decodes the tokens of several regions in one pass.
    order = torch.arange(model.tokens)
    if c.special:
        cells: list[int] = []
        for at in par_schedule(model.grid, c.regions).passes:
            cells += at.cells
        order = torch.tensor(cells)

    def theirs(settings: Any) -> Tensor:
        if name == "zipar":
            net.zipar_window_size = settings.window
            net.reset_zipar()
        net.start = True
        return generate(net, labels, model.tokens, cfg_scale=settings.cfg, sample_logits=False, **extra)

    return _tokens(name, Ready(LLAMAGEN, model), from_ids(labels.tolist()), sets, theirs, order)


def llamagen_network(networks: ModuleType, model: TokenModel, **extra: Any) -> Any:
    """The network of the reference's module with our weights."""
    c = model.net.config
    arguments = networks.ModelArgs(
        dim=c.dim,
        n_layer=c.depth,
        n_head=c.heads,
        vocab_size=c.vocab,
        num_classes=c.condition_size,
        block_size=model.tokens,
        **extra,
    )
    return load_weights(networks.Transformer(arguments), model.net)


def tar(root: Path, size: str, batch: int, sets: Mapping[str, str], name: str) -> Pair:
    """csuhan/Tar: its de-tokenizer AR-DTok."""
    dim, depth, heads = official.DTOK_SIZES[size]
    count = DTOK_GRID**2
    about = {"condition": "features", "condition_size": FEATURE_WIDTH, "absolute": count + FEATURES - 1}

    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = sizes.random_gpt(official.llama_config(dim, depth, heads, **about))
        features = torch.randn(FEATURES, FEATURE_WIDTH)

    with checkout(root, "tok") as load:
        networks = load("tok.ar_dtok.ar_model")

    arguments = networks.ModelArgs(
        dim=dim,
        n_layer=depth,
        n_head=heads,
        vocab_size=ours.config.vocab,
        model_type="clip_cond",
        cond_dim=FEATURE_WIDTH,
        cls_token_num=FEATURES,
        max_seq_len=count,
    )
    net: Any = load_weights(networks.ARModel(arguments), ours)
    given = features.expand(batch, -1, -1)

    def theirs(settings: Any) -> Tensor:
        with net.sampling():
            return networks.ar_generate(net, given, count, cfg_scale=settings.cfg, sample_logits=False)

    model = Ready(TAR, TokenModel(ours, f"{size}, random weights", DTOK_GRID))
    condition = FeatureCondition((features,) * batch, ("",) * batch)
    return _tokens(name, model, condition, sets, theirs, torch.arange(count))


# Ids around the prompt of a random Janus, whose text is its bytes.
_AROUND = Template(begin=256, image=257)


def janus(root: Path, size: str, batch: int, sets: Mapping[str, str], name: str) -> Pair:
    """transformers' JanusForConditionalGeneration, on our very tensors.

    ``sets`` may give a smaller grid than the published one.
    """
    sets = dict(sets)
    grid = whole(sets.pop("grid", "24"), "grid", 2, 24)

    with checkout(root) as load:
        hf = load("transformers")
        networks = load("transformers.models.janus")

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = sizes.random_janus(size)

    pad = net.config.pad
    theirs = _janus_reference(hf, networks, net, grid)

    model = JanusModel(
        net.fold(), f"{size}, random weights", grid, tokenize=lambda text: list(text.encode()), template=_AROUND
    )
    condition = PromptCondition(tuple(f"image {i:03}" for i in range(batch)))
    ids = torch.tensor([model.prompt(text) for text in condition.texts])

    def generate(settings: Any) -> Tensor:
        asked = hf.GenerationConfig(
            guidance_scale=settings.cfg,
            do_sample=False,
            bos_token_id=_AROUND.begin,
            pad_token_id=pad,
            max_length=ids.shape[1],
            generation_kwargs={"boi_token_id": _AROUND.image},
        )
        return theirs.generate(ids, torch.ones_like(ids), generation_mode="image", generation_config=asked)

    return _tokens("llamagen", Ready(JANUS, model), condition, sets, generate, torch.arange(model.tokens))


def _janus_reference(hf: ModuleType, networks: ModuleType, net: Any, grid: int) -> Any:
    """The model of transformers with the tensors of ours; ``grid``: tokens per side."""
    c = net.config
    text = hf.LlamaConfig(
        hidden_size=c.dim,
        num_hidden_layers=c.depth,
        num_attention_heads=c.heads,
        intermediate_size=c.hidden,
        vocab_size=c.words,
        max_position_embeddings=c.positions,
        rms_norm_eps=c.eps,
    )
    tokens = {"num_embeddings": c.vocab, "projection_dim": c.dim, "image_token_embed_dim": c.projected}
    seen = {"num_hidden_layers": 0, "num_image_tokens": grid**2}

    with torch.device("meta"):  # what reads and decodes images stays there
        config = networks.JanusConfig(text_config=text, vq_config=tokens, vision_config=seen)
        theirs: Any = networks.JanusForConditionalGeneration(config).eval()

    # Our tensors under their names; ours have those of the authors.
    state = net.state_dict()
    given = {}
    for name in theirs.state_dict():
        own = loader.authors_name(name)
        if own in state:
            given[name] = state.pop(own)
    theirs.load_state_dict(given, strict=False, assign=True)

    decoder = theirs.model.language_model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=text)
    if state or any(p.is_meta for p in decoder.parameters()):
        raise UserError("against: this version of transformers has other weights; use 5.x.")

    return theirs


def _fill(model: MARModel) -> None:
    """Random numbers in place of the initial zeros, which would leave little to compare."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.net.named_parameters():
            if "adaLN_modulation" in name or "final_layer.linear" in name:
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))


def mar_network(module: ModuleType, model: MARModel, steps: int, **extra: Any) -> Any:
    """The network of the reference's module with our weights, for ``steps`` diffusion steps."""
    c = model.net.config
    made = module.MAR(
        img_size=16 * c.grid,
        encoder_embed_dim=c.dim,
        encoder_depth=c.encoder_depth,
        encoder_num_heads=c.heads,
        decoder_embed_dim=c.dim,
        decoder_depth=c.decoder_depth,
        decoder_num_heads=c.heads,
        vae_embed_dim=c.channels,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        class_num=c.classes,
        buffer_size=c.buffer,
        diffloss_d=c.head_depth,
        diffloss_w=c.head_width,
        num_sampling_steps=str(steps),
        **extra,
    )
    return load_weights(made, model.net)


class _OneNoise(PairedNoise):
    """Noise for a comparison: every token starts from the same numbers, and later noise is zero."""

    def __init__(self, orders: Tensor, channels: int):
        self._orders = orders
        self.images = tuple(range(len(orders)))
        self.row = torch.randn(channels, generator=torch.Generator().manual_seed(1))

    def orders(self, tokens: int) -> Tensor:
        return self._orders

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self.row[:channels].expand(len(self._orders), tokens, -1)

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return torch.zeros(len(self._orders), count, tokens, channels)

    def drawn(self) -> AbstractContextManager[Any]:
        """PyTorch's own normal numbers are this noise."""

        def randn(*size: Any, **_: Any) -> Tensor:
            return self.row.expand(*size)

        def randn_like(x: Tensor, **_: Any) -> Tensor:
            return torch.zeros_like(x)

        return mock.patch.multiple(torch, randn=randn, randn_like=randn_like)


def mar(root: Path, size: str, batch: int, sets: Mapping[str, str], name: str) -> Pair:
    """LTH14/mar, feihongyan1/LazyMAR, or MarkXCloud/CSpD.

    CSpD has a random draft of half the depth and the mode *published*.
    """
    model: Any = sizes.random_model(size, "fp32", torch.device("cpu")).model
    _fill(model)
    c = model.net.config
    labels = torch.arange(batch) % c.classes

    entry = find(name)
    lazy = name == "lazymar"
    usual = {"t_max": "999", "mode": "published"} if name == "cspd" else {"t_max": "999"}
    settings: Any = make(entry.settings, {**usual, **sets})

    # The networks of the reference, and what our sampler takes beside the model.
    networks = [model]
    more = {}
    with checkout(root) as load:
        module = load("models.mar_cache" if lazy else "models.mar")
        if name == "cspd":
            runner = load("spec_decode.spec_decode_runner").SpecDecodeRunner
            draft = half_as_deep(model)
            networks = [draft, model]
            more = {"draft": draft}

    def theirs(nets: list[Any], s: Any) -> Tensor:
        asked = (s.cfg_schedule, labels, s.temperature)
        with torch.no_grad(), on_cpu():
            if name == "cspd":
                both = runner(*nets, PUBLISHED_RULE.inner_temperature, s.prefill_ratio)
                return both.run(batch, s.steps, s.draft_length, *asked, s.cfg)

            given = {"args": SimpleNamespace(device="cpu", lazy_mar=True)} if lazy else {}
            return nets[0].sample_tokens(batch, s.steps, s.cfg, *asked, **given)

    def ours(s: Any, noise: Any) -> Any:
        return finish(entry.run(model, from_ids(labels.tolist()), s, noise, **more))

    def references(steps: int, **extra: Any) -> list[Any]:
        return [mar_network(module, network, steps, **extra) for network in networks]

    def compare() -> float:
        short = replace(settings, steps=min(4, settings.steps), diffusion_steps=25)
        noise = _OneNoise(PairedNoise(0, range(batch)).orders(c.tokens), c.channels)

        nets = references(25)
        for net in nets:
            net.sample_orders = lambda bsz: noise.orders(c.tokens)

        with noise.drawn():
            want = theirs(nets, short)
        got = ours(short, noise).latents * model.latent_scale

        return float((got - want).abs().max() / want.abs().max())

    extra = {"lazy_mar": True} if lazy else {}
    nets = references(settings.diffusion_steps, **extra)
    steps = f"{settings.steps} x {settings.diffusion_steps}"
    return Pair(
        work=f"{entry.title}, {model.name.split(',')[0]}, {steps}, batch {batch}",
        ours=lambda seed: ours(settings, PairedNoise(seed, range(batch))).report,
        theirs=lambda: theirs(nets, settings),
        compare=compare if name == "mar" else None,
        tolerance=1e-3,
    )


def half_as_deep(model: MARModel) -> MARModel:
    """A model of half the depth with random weights from a fixed seed, as CSpD's draft."""
    c = model.net.config
    depths = {name: max(1, getattr(c, name) // 2) for name in ("encoder_depth", "decoder_depth", "head_depth")}

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        net = initialise_mar(MAR(replace(c, **depths))).eval().requires_grad_(False)

    small = replace(model, net=net, name="a draft of half the depth")
    _fill(small)
    return small


class Reference(NamedTuple):
    """A reference implementation."""

    file: str  # identifies its checkout
    sizes: Mapping[str, tuple[int, ...]]  # the usual one first
    pair: Callable[..., Pair]  # of a checkout's folder, a size, a batch, settings and the reference's name
    inside: str = ""  # folder of the modules in the checkout
    word: str = ""  # in the file


REFERENCES = {
    "lazymar": Reference("models/mar_cache.py", sizes.SIZES, mar),
    "cspd": Reference("spec_decode/spec_decode_runner.py", sizes.SIZES, mar),
    "mar": Reference("models/mar.py", sizes.SIZES, mar),
    "zipar": Reference(
        "LlamaGen-ZipAR/autoregressive/models/generate_zipar.py", sizes.TOKEN_SIZES, llamagen, "LlamaGen-ZipAR"
    ),
    "par": Reference("autoregressive/models/gpt.py", sizes.TOKEN_SIZES, llamagen, word="spe_tok"),
    "llamagen": Reference("autoregressive/models/gpt.py", sizes.TOKEN_SIZES, llamagen),
    "tar": Reference("tok/ar_dtok/ar_model.py", official.DTOK_SIZES, tar),
    "janus": Reference("transformers/models/janus/modeling_janus.py", official.JANUS_SIZES, janus),
}


def identify(folder: Path) -> tuple[str, Path]:
    """Which reference a checkout holds, by its name in :data:`REFERENCES`, and where its modules are."""
    for name, known in REFERENCES.items():
        file = folder / known.file
        if file.is_file() and known.word in file.read_text(encoding="utf-8-sig"):
            return name, folder / known.inside
    raise UserError(
        f"against: {folder} is not a checkout of MAR, LazyMAR, CSpD, LlamaGen, PAR, ZipAR, Tar or transformers."
    )
