"""Parity cases of Janus, recorded with the authors' code: the
network, sampling, the VQ tokenizer, prompts and parameter names.

A folder holds ``janus_config.json`` with the sizes, the recorded files named below, and the model folders ``original``,
``transformers`` and ``sharded``. Row 0 of a recorded pair is the conditional one, row 1 the null one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...model_loaders.janus import loader
from ...networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from ...networks.janus import TRUNK, Janus, JanusConfig, JanusModel
from ...networks.janus_vision import JanusVision, VisionConfig
from ...networks.llama import attend
from ...networks.ops import shapes_only
from ...samplers.conditioning import PromptCondition
from ...samplers.engine import finish
from ...samplers.tokens.canvas import token_canvas
from ...samplers.tokens.decode import decode_schedule
from ...samplers.tokens.schedule import raster
from ...samplers.tokens.settings import TokenSettings
from ...samplers.tokens.token_noise import TokenNoise
from .cases import Case, Check, Known, exact, from_files, read_json, read_tensors, relative, same_shapes
from .llamagen import MultinomialNoise, replay

CONFIG, IO, VQ = "janus_config.json", "janus_io.safetensors", "janus_vq_io.safetensors"
SHARDED = "janus_sharded_io.safetensors"
WORDS, KEYS = "janus_prompts.json", re.compile(r"janus_keys_(\w+)_(?:original|transformers)\.json")
TOLERANCE = 1e-5
Tensors = Mapping[str, Tensor]
_SAMPLED = re.compile(r"j4\.(\w+)\.cfg([\d.]+)_t([\d.]+)\.tokens")
# The prompt that the reference encodes otherwise than this package: names of special tokens are plain text here.
_PLAIN = "tag inside"


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: Known = {
        IO: ((CONFIG, "original/config.json"), _recorded),
        VQ: ((CONFIG, "original/config.json"), _tokenizer),
        SHARDED: ((CONFIG, "sharded/config.json"), _sharded),
        WORDS: ((CONFIG,), _prompts),
    }
    out = from_files(folder, known, "janus")
    return out + [_names(path) for path in sorted(folder.iterdir()) if KEYS.fullmatch(path.name)]


@lru_cache(maxsize=4)
def _model(folder: Path, part: str) -> JanusModel:
    sizes = read_json(folder / CONFIG)
    grid = sizes["original" if part == "transformers" else part]["grid"][0]
    return replace(loader.load_janus(folder / part, "fp32"), grid=grid)


@lru_cache(maxsize=4)
def _vq(folder: Path, part: str) -> VQAutoencoder:
    return loader.load_janus_vq(folder / part, "fp32").net


def _prompted(model: JanusModel, *prompts: Tensor) -> tuple[JanusModel, PromptCondition]:
    """The model with a tokenizer that gives these very prompts, int64 [n] each, and their condition."""
    inside = {f"User: {i}\n\nAssistant:": ids[1:-1].tolist() for i, ids in enumerate(prompts)}
    template = replace(model.template, user=None, assistant=None)
    texts = tuple(str(i) for i in range(len(prompts)))
    return replace(model, tokenize=inside.__getitem__, template=template), PromptCondition(texts)


def _both(model: JanusModel, prompts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Teacher-forced logits [B, 2, N, V] of both rows of every prompt, by the passes of serial decoding."""
    model, condition = _prompted(model, *prompts)
    return torch.stack([replay(model, condition, raster(model.grid), tokens, null=half) for half in (False, True)], 1)


def _guided(both: Tensor, cfg: float) -> Tensor:
    return both[:, 1] + cfg * (both[:, 0] - both[:, 1])


def _tokens(model: JanusModel, prompts: Sequence[Tensor], settings: TokenSettings, draws: TokenNoise) -> Tensor:
    """Generated tokens int64 [B, N]."""
    model, condition = _prompted(model, *prompts)
    canvas, prepared = token_canvas("verify", model, condition, settings, draws)
    return finish(decode_schedule(canvas, prepared, raster(model.grid))).latents.flatten(1)


class Recorded(NamedTuple):
    """Noise of cells from a table fp32 [B, N, V]."""

    table: Tensor

    def gumbel(self, cells: Tensor) -> Tensor:
        if cells.ndim == 1:
            return self.table[:, cells]

        inside = cells.clamp(max=self.table.shape[1] - 1)  # without the cell of padding
        return torch.stack([row[own] for row, own in zip(self.table, inside, strict=True)])


class Gumbel(TokenNoise):
    """Recorded Gumbel numbers fp32 [B, N, V]; zeros for greedy runs."""

    def __init__(self, table: Tensor):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def of(self, images: Sequence[int]) -> TokenNoise:
        return Gumbel(self.table[list(images)])

    def stream(self, name: str, values: int, device: torch.device) -> Any:
        return Recorded(self.table)


def _greedy(cfg: float) -> TokenSettings:
    return TokenSettings(cfg=cfg, top_k=1)


# ------------------------------------------------------------------------------------------------ network and sampling


def _recorded(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / IO)
    yield from _network(folder, io)
    yield from _sampling(folder, io)


def _network(folder: Path, io: Tensors) -> Iterator[Case]:
    """Layers, rotations, teacher-forced logits, null prompts and the embedding."""

    def inside() -> Iterator[Check]:
        net, ids = _model(folder, "original").net, io["j1.ids"][None]
        x = net.prefix(ids, guided=True)
        yield relative(x, io["j1.embeds"], TOLERANCE)
        place = torch.arange(ids.shape[1])[None]
        layers = [x]
        hooks = [block.register_forward_hook(lambda *args: layers.append(args[-1].clone())) for block in net.layers]
        hidden = net.hidden(x, place, lambda i, q, k, v: attend(q, k, v, causal=True))
        for hook in hooks:
            hook.remove()
        yield relative(torch.stack([*layers[:-1], hidden]), io["j1.layers"], TOLERANCE)
        yield relative(hidden, io["j1.hidden_all"], TOLERANCE)
        last, _ = net.prefill(x, 2, 4)
        yield relative(net.norm(last)[:, -1], io["j1.hidden"], TOLERANCE)
        yield relative(net.logits(last)[:, -1], io["j1.logits"], TOLERANCE)

    def rotations() -> Iterator[Check]:
        net = _model(folder, "original").net
        cos, sin = net.rope(torch.arange(len(io["rope.cos"]))).unbind(-2)
        half = cos.shape[-1] // 2
        yield relative(cos, io["rope.cos"], TOLERANCE)
        yield relative(torch.cat([-sin[:, :half], sin[:, half:]], -1), io["rope.sin"], TOLERANCE)

    def forced(part: str, key: str, ids: str, tokens: str) -> Iterator[Check]:
        yield relative(_both(_model(folder, part), [io[ids]], io[tokens][None])[0], io[key], TOLERANCE)

    def null(name: str) -> Iterator[Check]:
        net, ids = _model(folder, "original").net, io[f"{name}.ids"]
        x = net.prefix(ids[None], guided=True)
        yield exact(x[1], net.words(io[f"{name}.null"]))
        yield relative(net.logits(net.prefill(x, 2, 4)[0])[:, -1], io[f"{name}.logits"], TOLERANCE)

    def embedding() -> Iterator[Check]:
        net = _model(folder, "original").net
        yield relative(net.tok_embeddings(torch.arange(net.config.vocab)), io["j7.embedding"], TOLERANCE)

    yield Case("janus/j1", inside)
    yield Case("janus/rope", rotations)
    yield Case("janus/j2", partial(forced, "original", "j2.logits", "j2.ids", "j2.tokens"))
    for name in sorted(key.removesuffix(".ids") for key in io if key.startswith("j5.") and key.endswith(".ids")):
        yield Case(f"janus/{name}", partial(null, name))
    yield Case("janus/j7", embedding)
    second = "transformers" if (folder / "transformers" / "config.json").is_file() else "original"
    yield Case("janus/j9", partial(forced, second, "j9.logits", "j2.ids", "j2.tokens"))


def _sampling(folder: Path, io: Tensors) -> Iterator[Case]:
    """Greedy and sampled images, of one prompt and of two together."""

    def greedy(cfg: str) -> Iterator[Check]:
        net, ids = _model(folder, "original").net, io["j3.ids"]
        yield exact(net.prefix(ids[None], guided=True)[1], net.words(io["j3.null"]))
        yield from _greedy_run(folder, "original", ids, io, f"j3.cfg{cfg}", float(cfg))

    def sampled(how: str, cfg: float, temperature: float, name: str) -> Iterator[Check]:
        model, expected = _model(folder, "original"), io[f"{name}.tokens"]
        prompts = [io["j3.ids"]] * len(expected)
        settings = TokenSettings(cfg=cfg, temperature=temperature, top_k=0)
        guided = _guided(_both(model, prompts, expected), cfg) / temperature
        if f"{name}.guided_over_t" in io:
            yield relative(guided, io[f"{name}.guided_over_t"], TOLERANCE)
        if how == "uniform":  # another way to draw: the logits alone are this package's
            total = guided.double().softmax(-1).cumsum(-1)
            yield exact((total / total[..., -1:] <= io["j4.uniform"][..., None]).sum(-1), expected)
            return

        draws: Any = Gumbel(io["j4.gumbel"])
        if how.startswith("seed"):
            draws = MultinomialNoise(int(how.removeprefix("seed")), len(expected), together=False)
        yield exact(_tokens(model, prompts, settings, draws), expected)

    def together() -> Iterator[Check]:
        model, names = _model(folder, "original"), ("j6.a", "j6.b")
        prompts = [io[f"{name}.ids"] for name in names]
        gumbel = Gumbel(io["j4.gumbel"])
        runs = {"tokens": (_greedy(5.0), Gumbel(torch.zeros_like(gumbel.table)))}
        runs |= {"gumbel_tokens": (TokenSettings(cfg=5.0, top_k=0), gumbel)}

        for key, (settings, draws) in runs.items():
            tokens = _tokens(model, prompts, settings, draws)
            yield exact(tokens, torch.stack([io[f"{name}.{key}"] for name in names]))

        both = _both(model, prompts, torch.stack([io[f"{name}.tokens"] for name in names]))

        for i, name in enumerate(names):
            yield relative(both[i], io[f"{name}.logits"], TOLERANCE)
            yield relative(_guided(both, 5.0)[i], io[f"{name}.guided"], TOLERANCE)

    for cfg in ("5", "1"):
        yield Case(f"janus/j3.cfg{cfg}", partial(greedy, cfg))

    for m in filter(None, map(_SAMPLED.fullmatch, sorted(io))):
        name = m[0].removesuffix(".tokens")
        yield Case(f"janus/{name}", partial(sampled, m[1], float(m[2]), float(m[3]), name))

    yield Case("janus/j6", together)


def _greedy_run(folder: Path, part: str, ids: Tensor, io: Tensors, name: str, cfg: float) -> Iterator[Check]:
    """Tokens, logits and image of a recorded greedy run of one prompt; some files lack logits or the image."""
    model = _model(folder, part)
    tokens = _tokens(model, [ids], _greedy(cfg), Gumbel(torch.zeros(1, model.tokens, model.net.config.vocab)))
    yield exact(tokens[0], io[f"{name}.tokens"])
    both = _both(model, [ids], tokens)
    if f"{name}.logits" in io:
        yield relative(both[0], io[f"{name}.logits"], TOLERANCE)
    yield relative(_guided(both, cfg)[0], io[f"{name}.guided"], TOLERANCE)
    if f"{name}.image" not in io:
        return
    net = _vq(folder, part)
    image = net.decode_codes(tokens.view(-1, model.grid, model.grid))
    yield relative(image, io[f"{name}.image"], TOLERANCE)
    if f"{name}.image_u8" in io:  # the reference cuts fractions off
        whole = ((image + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        yield exact(whole, io[f"{name}.image_u8"])


def _sharded(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / SHARDED)

    def checks() -> Iterator[Check]:
        model = _model(folder, "sharded")
        yield relative(_both(model, [io["s.ids"]], io["s.tokens"][None])[0], io["s.logits"], TOLERANCE)
        yield from _greedy_run(folder, "sharded", io["s.prompt_ids"], io, "s.greedy.cfg5", 5.0)

    yield Case("janus/sharded", checks)


# ------------------------------------------------------------------------------------------------ VQ, prompts, names


def _tokenizer(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / VQ)

    def decoded(name: str) -> Iterator[Check]:
        net, codes = _vq(folder, "original"), io[f"{name}.tokens"]
        vectors = net.vectors(codes)
        yield relative(vectors, io[f"{name}.zq"], TOLERANCE)
        yield relative(net.post_quant_conv(vectors), io[f"{name}.post_quant"], TOLERANCE)
        yield relative(net.decode_codes(codes), io[f"{name}.image"], TOLERANCE)

    def encoded() -> Iterator[Check]:
        net = _vq(folder, "original")
        features = net.features(io["j8.pixels"])
        yield relative(features, io["j8.encoded"], TOLERANCE)
        yield exact(net.codes(features), io["j8.codes"])
        yield relative(net.decode_codes(io["j8.codes"]), io["j8.recon"], TOLERANCE)

    for key in sorted(io):
        if key.endswith(".tokens"):
            name = key.removesuffix(".tokens")
            yield Case(f"janus/{name}", partial(decoded, name))

    yield Case("janus/j8.encoded", encoded)


def _prompts(folder: Path) -> Iterator[Case]:
    def checks(part: str, prompts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
        model = _model(folder, part)
        words = replace(model, template=replace(model.template, user=None, assistant=None))
        for prompt in prompts:
            tagged = prompt["name"] == _PLAIN
            expected = prompt["ids_plain" if tagged else "ids"]
            yield exact(torch.tensor(model.prompt(prompt["prompt"])), torch.tensor(expected))
            if not tagged:
                yield exact(torch.tensor(words.prompt(prompt["prompt"])), torch.tensor(prompt["ids_1_3b"]))

    for part, recorded in read_json(folder / WORDS).items():
        if (folder / part / "config.json").is_file():
            yield Case(f"janus/j11.{part}", partial(checks, part, recorded["prompts"]))


def _names(path: Path) -> Case:
    """Names and shapes of an official file, compared with networks of that size on the meta device."""

    def checks() -> Iterator[Check]:
        shapes = read_json(path)["keys"]
        kept = {
            loader.authors_name(name): tuple(shape)
            for name, shape in shapes.items()
            if not name.startswith(loader.UNUSED)
        }
        mine = {name: shape for name, shape in kept.items() if not name.startswith(loader.VQ_PREFIX)}
        vq = {n.removeprefix(loader.VQ_PREFIX): shape for n, shape in kept.items() if n not in mine}
        yield same_shapes(mine, lambda state: Janus(JanusConfig.of_janus(state)))
        yield same_shapes(vq, lambda state: VQAutoencoder(VQConfig.from_state_dict(state)), (HISTORY,))

        # What reads images, and the output layer for words.
        with shapes_only():
            tensors = {
                name: torch.empty(tuple(shape))
                for name, shape in shapes.items()
                if name.startswith(loader.VISION_PREFIXES) and not name.startswith(loader.POOL_PREFIX)
            }
            vision = {name: tuple(tensor.shape) for name, tensor in loader.vision_state(tensors).items()}
        yield same_shapes(vision, lambda state: JanusVision(VisionConfig.from_state_dict(state)))
        (words,) = (shape for name, shape in shapes.items() if name in loader.WORD_HEADS)
        (rows,) = (shape for name, shape in mine.items() if name == f"{TRUNK}model.embed_tokens.weight")
        yield exact(torch.tensor(words), torch.tensor(rows))

    return Case(f"janus/j10.{path.stem.removeprefix('janus_keys_')}", checks)
