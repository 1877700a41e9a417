"""Parity cases of BitDance, recorded with the authors' code and with the diffusers classes: networks, diffusion, whole
generations, the autoencoder, prompts and parameter names.

A folder holds ``bitdance_meta.json`` with the runs, the recorded files named below, and the models ``native``,
``diffusers`` and ``imagenet``. Row 0 of a recorded pair is the conditional one. Tokens stand in the order of their
blocks, but for grids.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.bitdance import loader
from ...model_loaders.files import checkpoint as ck
from ...model_loaders.files.shards import weight_files
from ...networks.binary import BinaryAutoencoder, BinaryConfig
from ...networks.bitdance import (
    CLASS_HEAD_DIM,
    TEXT_HEAD_DIM,
    BitDanceClass,
    BitDanceConfig,
    BitDanceText,
    BlockModel,
    Head,
    HeadConfig,
    block_order,
)
from ...networks.llama import HEAD, Llama, LlamaConfig, attend
from ...networks.speed import Recordable
from ...reports.record import Report
from ...samplers import chain, diffusion_steps
from ...samplers.blocks.bitdance import bitdance
from ...samplers.blocks.diffusion import head_calls
from ...samplers.blocks.settings import BlockSettings
from ...samplers.chain import MODULATION_BUDGET
from ...samplers.conditioning import ClassCondition, PromptCondition, from_ids
from ...samplers.diffusion_steps import HeadCalls
from ...samplers.engine import finish
from ...samplers.noise import PairedNoise
from .cases import Case, Check, Known, exact, from_files, read_json, read_tensors, same_shapes

META = "bitdance_meta.json"
# The recorded files of text models: the letter of their runs, and their folder.
TEXT = {"bitdance_t2i_io.safetensors": ("A", "native"), "bitdance_diffusers_io.safetensors": ("B", "diffusers")}
FORMULA, SHAPES = "bitdance_formula_io.safetensors", "bitdance_formula_shapes.json"
IMAGENET, SIZES = "bitdance_imagenet_io.safetensors", "imagenet/sizes.json"
WORDS, REAL_WORDS = "bitdance_prompts.json", "bitdance_prompts_real.json"
KEYS, CLASS_KEYS = "bitdance_keys_14b.json", "bitdance_keys_imagenet.json"
# Largest differences of hidden rows, of the head's outputs, of pixels, of predictions without guidance and with it,
# which multiplies rounding, and of states.
INSIDE, OUTPUT, PIXELS, PLAIN, GUIDED, PATH = 1e-5, 5e-5, 1e-4, 1e-4, 2e-3, 5e-3
# Share of the 8-bit numbers that may be one level off: the reference cuts fractions off.
ONE_OFF = 1 / 200
Tensors = Mapping[str, Tensor]


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: Known = {
        **{io: ((META,), partial(_text, io=io)) for io in TEXT},
        FORMULA: ((META, SHAPES), _formula),
        IMAGENET: ((META, SIZES), _imagenet),
        WORDS: ((), partial(_prompts, name=WORDS)),
        REAL_WORDS: ((), partial(_prompts, name=REAL_WORDS)),
        KEYS: ((), _text_names),
        CLASS_KEYS: ((KEYS,), _class_names),
    }
    return from_files(folder, known, "bitdance")


@lru_cache(maxsize=4)
def _model(path: Path) -> BlockModel:
    """A model in fp32."""
    sizes = read_json(path.parent / "sizes.json") if path.suffix else {}
    about = sizes.get(path.stem.rpartition("_")[2], {})
    model = loader.load_bitdance(path, "fp32", heads=about.get("n_head"))
    return replace(model, stride=2 ** (len(about["ddconfig"]["ch_mult"]) - 1)) if about else model


@lru_cache(maxsize=4)
def _decoder(path: Path) -> BinaryAutoencoder:
    """An autoencoder in fp32, of a model's file or folder."""
    found = loader.autoencoder_path(path)
    assert found is not None, "the autoencoder is missing"
    return loader.load_binary(found, "fp32").net


class RecordedNoise(PairedNoise):
    """Recorded noise: start [blocks, B, P, C] and steps [blocks, T, B, P, C] in the order of ``cells``, and that of the
    null branch for block 0.
    """

    def __init__(self, start: Tensor, steps: Tensor, cells: Tensor, null: tuple[Tensor, Tensor] | None = None):
        self.images = tuple(range(start.shape[1]))
        back = cells.argsort()
        self._first = {"full": start.transpose(0, 1).flatten(1, 2)[:, back]}
        self._steps = {"full": steps.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, back]}
        if null is not None:
            self._first["null"], self._steps["null"] = null[0], null[1].transpose(0, 1)

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._first[stream]

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self._steps[stream]


@dataclass(frozen=True)
class Seen:
    """What the diffusion head read and computed in a run."""

    conditions: list[Tensor]  # rows [R, P, D] of every block
    outputs: list[Tensor]  # [R, P, C] of every evaluation


@contextmanager
def watched(head: Head) -> Iterator[Seen]:
    """Record what a head reads and computes."""
    seen = Seen([], [])
    hooks = [
        head.cond_embed.register_forward_pre_hook(lambda layer, args: seen.conditions.append(args[0].flatten(0, -3))),
        head.final_layer.linear.register_forward_hook(lambda layer, args, out: seen.outputs.append(out)),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _pixels(image: Tensor) -> Tensor:
    """Pixels uint8 [B, H, W, 3], fractions cut off."""
    return (127.5 * image + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _same_pixels(image: Tensor, expected: Tensor) -> Iterator[Check]:
    """At most one level of difference, in few numbers."""
    levels = (_pixels(image).int() - expected.int()).abs()
    yield Check(levels, torch.zeros_like(levels), 1.0)
    yield Check((levels > 0).float().mean(), torch.tensor(0.0), ONE_OFF)


def _run(
    model: BlockModel,
    condition: ClassCondition | PromptCondition,
    settings: BlockSettings,
    noise: RecordedNoise,
    io: Tensors,
    name: str,
) -> Iterator[Check]:
    """A whole recorded generation: conditions, predictions, tokens and image."""
    net = model.net
    with watched(net.denoiser) as seen:
        out = finish(bitdance(model, condition, settings, noise))
    evaluations = settings.diffusion_steps + 1
    grid = io[f"{name}.grid"]
    blocks = len(seen.conditions)
    images = len(condition)

    if f"{name}.cond" in io:
        yield Check(torch.stack(seen.conditions), io[f"{name}.cond"], INSIDE)

    predictions = []
    for block in range(blocks):
        made = seen.outputs[(block + 1) * evaluations - 1]
        made = torch.tanh(made / 2) if net.head_config.bounded else made
        cfg = settings.cfg
        if settings.cfg_schedule == "linear":
            cfg = 1 + (settings.cfg - 1) * block / blocks
        if block == 0 and f"{name}.pre0" in io and cfg == 1:
            yield Check(made, io[f"{name}.pre0"], PLAIN)
        if len(made) > images:
            conditional, null = made.chunk(2)
            made = null + cfg * (conditional - null)
        predictions.append(made)
    yield Check(torch.cat(predictions, 1), io[f"{name}.pre"], PLAIN if settings.cfg == 1 else GUIDED)

    yield exact(out.latents, grid.float())
    cells = block_order(grid.shape[2], grid.shape[3], net.side)
    yield exact(out.latents.flatten(2).transpose(1, 2)[:, cells], io[f"{name}.tokens"].float())


def _image(path: Path, io: Tensors, name: str) -> Iterator[Check]:
    """The image of a generation.

    The reference decodes channels-last tensors. PyTorch's GroupNorm of those rounds more: by up to 1e-4 here, where the
    other layout agrees with fp64 to 1e-6.
    """
    bits = io[f"{name}.grid"].float().contiguous(memory_format=torch.channels_last)
    image = _decoder(path).decode(bits)
    yield Check(image, io[f"{name}.image"], PIXELS)
    yield from _same_pixels(image, io[f"{name}.image_u8"])


# ------------------------------------------------------------------------------------------------ text


def _text(folder: Path, io: str) -> Iterator[Case]:
    data = read_tensors(folder / io)
    letter, part = TEXT[io]
    runs = read_json(folder / META)["runs"]
    grids = [tuple(map(int, name.split(".")[-1].split("x"))) for name in data if name.startswith("b1.pos.")]

    def positions() -> Iterator[Check]:
        for height, width in grids:
            places = _model(folder / part).net.places((height, width))
            yield exact(places, data[f"b1.pos.{height}x{width}"])

    def projector() -> Iterator[Check]:
        net = _model(folder / part).net
        tokens = data["b2.tokens"].float()
        yield Check(net.embed(tokens, torch.zeros(1, net.config.dim)), data["b2.embeds"], INSIDE)

    def head() -> Iterator[Check]:
        net = _model(folder / part).net.denoiser
        out = [net(data["b5.x"], t.expand(len(data["b5.x"])), data["b5.c"]) for t in data["b5.t"]]
        # Its sums are rounded otherwise on every processor: by 1.1e-5 on one.
        yield Check(torch.stack(out), data["b5.out"], OUTPUT)

    for name, checks in {"b1": positions, "b2": projector, "b5": head}.items():
        yield Case(f"bitdance/{letter}.{name}", checks)
    yield Case(f"bitdance/{letter}.b3", partial(_prefill, folder / part, data))
    yield Case(f"bitdance/{letter}.b4", partial(_forced, folder / part, data))
    yield Case(f"bitdance/{letter}.b8", partial(_codes, folder / part, data))

    for run, about in runs.items():
        name = run.removeprefix(f"{letter}.")
        if name.startswith("b6."):
            yield Case(f"bitdance/{run}", partial(_sampling, folder / part, data, name, about))
        elif name.startswith("b7."):
            yield Case(f"bitdance/{run}", partial(_generation, folder / part, data, name, about))


def _second_grid(model: BlockModel, io: Tensors) -> tuple[int, int]:
    """The grid that the recorded size tokens of the prefill say."""
    _, height, width, *_ = io["b3.tail"].tolist()
    assert model.marks is not None
    sides = {number: side for side, number in model.marks.sizes.items()}
    return sides[height], sides[width]


def _started(model: BlockModel, io: Tensors) -> tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
    """The recorded prompt and the null prompt as rows, and their grid."""
    grid = _second_grid(model, io)
    return grid, model.prompt_rows([io["b3.ids"].tolist(), io["b3.null"].tolist()], grid)


def _prefill(folder: Path, io: Tensors) -> Iterator[Check]:
    """Prompts of two lengths, and the first block of rows."""
    model = _model(folder)
    net = model.net
    marks = model.marks
    assert marks is not None
    grid, (prefix, lengths, first) = _started(model, io)
    tail = [marks.image, marks.sizes[grid[0]], marks.sizes[grid[1]], *marks.queries]
    yield exact(torch.tensor(tail), io["b3.tail"])

    for branch, count in enumerate(lengths.tolist()):
        place = torch.arange(count)[None]
        rows = prefix[branch : branch + 1, :count]
        hidden = net.hidden(rows, place, lambda i, q, k, v: attend(q, k, v, causal=True))[0]
        yield Check(hidden, io[f"b3.causal.{branch}"], INSIDE)
        # The output layer for words is in the file, and is not read for images.
        shards = weight_files(folder, "checkpoint", "a BitDance")
        words = ck.read(shards[0].parent, shards=shards).state[HEAD].float()
        yield Check(words @ hidden[-1], io["b3.logits"][branch], PLAIN)

    hidden, _ = net.begin(prefix, lengths, first, grid)
    yield Check(hidden, io["b3.hidden"], INSIDE)


def _forced(folder: Path, io: Tensors) -> Iterator[Check]:
    """Hidden rows of given tokens: a block in each pass, and all in one."""
    model = _model(folder)
    net = model.net
    grid, (prefix, lengths, first) = _started(model, io)
    places = net.places(grid)
    hidden, cache = net.begin(prefix, lengths, first, grid)
    tokens = io["b4.tokens"].float().expand(len(hidden), -1, -1)
    size = net.block

    found = [hidden]
    for at in range(0, tokens.shape[1] - size, size):
        rows = net.embed(tokens[:, at : at + size], places[at : at + size])
        found.append(net.advance(rows, at + size, cache))
    yield Check(torch.stack(found, 1), io["b4.hidden"], INSIDE)

    rows = net.embed(tokens[:, :-size], places[:-size])
    together = net.advance(rows, size, cache).unflatten(1, (-1, size))
    yield Check(together, io["b4.hidden"][:, 1:], INSIDE)


def _sampling(folder: Path, io: Tensors, name: str, about: Mapping[str, Any]) -> Iterator[Check]:
    """The diffusion of a block."""
    model = _model(folder)
    cfg = about["cfg"]
    guided = cfg != 1
    made = head_calls(about["steps"], model.time_shift)
    path = _denoised(model.net.denoiser, made, io[f"{name}.start"], io[f"{name}.step"], io[f"{name}.cond"], cfg)
    yield Check(torch.stack(path[:-1]), io[f"{name}.path"], PATH if guided else PLAIN)
    yield Check(path[-1], io[f"{name}.pre"], GUIDED if guided else PLAIN)


def _denoised(net: Head, made: HeadCalls, start: Tensor, noise: Tensor, conditions: Tensor, cfg: float) -> list[Tensor]:
    """The states of rows [B, P, C] before and after every step; ``conditions`` of all branches, [R, P, D]."""
    z = conditions.unflatten(0, (-1, len(start)))
    table = diffusion_steps.step_table(made.steps, net.times(torch.tensor(made.times)))
    rows = chain.DiffusionBatch(z, torch.full((len(start), 1, 1), cfg), start, noise, table)
    plain = Recordable()
    head = chain.FullChainHead(plain, net, rows, Report("verify", "", {}, None, len(start), "cpu"), MODULATION_BUDGET)
    return [start, *(done.x for done in chain.run_chain(rows, head))]


def _generation(folder: Path, io: Tensors, name: str, about: Mapping[str, Any]) -> Iterator[Check]:
    """A whole generation."""
    model = _model(folder)
    yield exact(torch.tensor(model.prompt(about["prompt"])), io[f"{name}.ids"])

    settings = BlockSettings(
        diffusion_steps=about["steps"], cfg=about["cfg"], width=about["width"], height=about["height"]
    )
    grid = model.grid(about["height"], about["width"])
    cells = block_order(*grid, model.net.side)
    noise = RecordedNoise(io[f"{name}.start"], io[f"{name}.step"], cells)
    condition = PromptCondition((about["prompt"],) * about["images"])
    yield from _run(model, condition, settings, noise, io, name)

    yield from _image(folder, io, name)


def _codes(folder: Path, io: Tensors) -> Iterator[Check]:
    """The autoencoder."""
    net = _decoder(folder)
    image = net.decode(io["b8.tokens"].float())
    yield Check(image, io["b8.image"], INSIDE)
    yield from _same_pixels(image, io["b8.image_u8"])

    bits, features = net.encode(io["b8.pixels"])
    yield Check(features, io["b8.encoded"], INSIDE)
    yield exact(bits, io["b8.codes"].float())
    yield Check(net.decode(bits), io["b8.recon"], INSIDE)
    cells = block_order(bits.shape[2], bits.shape[3], _model(folder).net.side)
    yield exact(bits.flatten(2).transpose(1, 2)[:, cells], io["b8.in_order"].float())


# ------------------------------------------------------------------------------------------------ formula


def formula_state(shapes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Weights by the formula of the README."""
    state = {}
    for n, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        count = torch.tensor(shape).prod().item()
        x = (torch.arange(count) * 2654435761 + 40503 * n + 977) % 2**32
        for shift, factor in ((15, 1664525), (13, 1103515245)):
            x = ((x ^ (x >> shift)) * factor) % 2**32
        v = (x ^ (x >> 16)).double() / 2**32 - 0.5

        if len(shape) > 1:
            inputs = torch.tensor(shape[1:]).prod().item()
            v = v * 12**0.5 * 0.9 / inputs**0.5
        elif "norm" in name and name.endswith("weight"):
            v = 1 + 0.3 * v
        else:
            v = 0.3 * v
        state[name] = v.float().view(shape)

    return state


def _formula(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / FORMULA)

    def head() -> Iterator[Check]:
        state = formula_state(read_json(folder / SHAPES)["f1"])
        net = Head(HeadConfig.from_state_dict(state, TEXT_HEAD_DIM, bounded=True))
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in state.items()})
        out = [net(io["f1.x"], t.expand(len(io["f1.x"])), io["f1.c"]) for t in io["f1.t"]]
        yield Check(torch.stack(out), io["f1.out"], INSIDE)

        made = head_calls(len(io["f1.step"]))
        path = _denoised(net, made, io["f1.start"], io["f1.step"], io["f1.c"], 3.0)
        yield Check(path[-1], io["f1.pre"], GUIDED)

    def noisy() -> Iterator[Check]:
        state = formula_state(read_json(folder / SHAPES)["f2"])
        net = BinaryAutoencoder(BinaryConfig.from_state_dict(state))
        net.load_state_dict(state)
        yield Check(net.decoder(io["f2.tokens"].float(), io["f2.noise"]), io["f2.image"], INSIDE)
        bits, features = net.encode(io["f2.pixels"])
        yield Check(features, io["f2.encoded"], INSIDE)
        yield exact(bits, io["f2.codes"].float())

    yield Case("bitdance/f1", head)
    yield Case("bitdance/f2", noisy)


# ------------------------------------------------------------------------------------------------ ImageNet


def _imagenet(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / IMAGENET)
    runs = read_json(folder / META)["runs"]
    for size in read_json(folder / SIZES):
        tag = f"i{size.removesuffix('x')}"
        files = sorted((folder / "imagenet").glob(f"*_{size}.*"))
        for path in files:
            suffix = "" if path == files[0] else f" {path.suffix}"
            yield Case(f"bitdance/{tag}.rope{suffix}", partial(_rotations, path, io[f"{tag}.freqs_cis"]))
            for run, about in runs.items():
                if run.startswith(f"{tag}."):
                    yield Case(f"bitdance/{run}{suffix}", partial(_labelled, path, io, run, about))


def _rotations(path: Path, expected: Tensor) -> Iterator[Check]:
    model = _model(path)
    config = model.net.config
    assert isinstance(config, BitDanceConfig)
    encodings = model.net.encodings((config.grid, config.grid), config.rows - 1, None)
    yield Check(encodings.table[: len(expected)], expected, INSIDE)


def _labelled(path: Path, io: Tensors, name: str, about: Mapping[str, Any]) -> Iterator[Check]:
    """A whole generation of class labels."""
    model = _model(path)
    labels = io[f"{name}.labels"].tolist()
    images = len(labels)
    settings = BlockSettings(diffusion_steps=about["steps"], cfg=about["cfg"], cfg_schedule=about["schedule"])

    start0, step0 = io[f"{name}.start0"], io[f"{name}.step0"]
    start = torch.cat([start0[None, :images], io[f"{name}.start"]])
    steps = torch.cat([step0[None, :, :images], io[f"{name}.step"]])
    null = (start0[images:], step0[:, images:]) if len(start0) > images else None
    cells = block_order(*model.grid(None, None), model.net.side)
    noise = RecordedNoise(start, steps, cells, null)
    yield from _run(model, from_ids(labels), settings, noise, io, name)

    if loader.autoencoder_path(path) is not None:
        yield from _image(path, io, name)


# ------------------------------------------------------------------------------------------------ prompts, names


def _prompts(folder: Path, name: str) -> Iterator[Case]:
    """Token ids of prompts; "not yet" without the package ``tokenizers`` or the tokenizer itself."""

    def checks(part: str, recorded: Mapping[str, Any]) -> Iterator[Check]:
        model = _model(folder / part)
        yield exact(torch.tensor(model.null_prompt()), torch.tensor(recorded["null"]["ids"]))
        for prompt in recorded["prompts"]:
            expected = prompt.get("ids_plain", prompt["ids"])
            yield exact(torch.tensor(model.prompt(prompt["prompt"])), torch.tensor(expected))

    for part, recorded in read_json(folder / name).items():
        there = (folder / part).is_dir() and importlib.util.find_spec("tokenizers") is not None
        yield Case(f"bitdance/prompts.{part}", partial(checks, part, recorded) if there else None)


def _text_names(folder: Path) -> Iterator[Case]:
    recorded = read_json(folder / KEYS)

    def checks(changes: Mapping[str, Any]) -> Iterator[Check]:
        shapes = {part: {**keys, **changes.get(part, {})} for part, keys in recorded["files"].items()}
        words = {name: shape for name, shape in shapes["model"].items() if not name.startswith("lm_head.")}
        yield same_shapes(words, lambda state: Llama(LlamaConfig.of_qwen(state, tied=True)))

        head = {f"head.{name}": shape for name, shape in shapes["vision_head"].items()}
        projector = {f"projector.{name}": shape for name, shape in shapes["projector"].items()}

        def whole(state: dict[str, Tensor]) -> BitDanceText:
            of_head = {name.removeprefix("head."): t for name, t in state.items() if name.startswith("head.")}
            config = HeadConfig.from_state_dict(of_head, TEXT_HEAD_DIM, bounded=True)
            return BitDanceText(LlamaConfig.of_qwen(state, tied=True), config, 64)

        yield same_shapes({**words, **head, **projector}, whole)
        yield same_shapes(shapes["ae"], lambda state: BinaryAutoencoder(BinaryConfig.from_state_dict(state)))

    yield Case("bitdance/keys.14b-64x", partial(checks, {}))
    yield Case("bitdance/keys.14b-16x", partial(checks, recorded["16x_differs"]))


def _class_names(folder: Path) -> Iterator[Case]:
    recorded = read_json(folder / CLASS_KEYS)

    def checks(shapes: Mapping[str, Any]) -> Iterator[Check]:
        def make(state: dict[str, Tensor]) -> BitDanceClass:
            of_head = {name.removeprefix("head."): t for name, t in state.items() if name.startswith("head.")}
            head = HeadConfig.from_state_dict(of_head, CLASS_HEAD_DIM, bounded=False)
            return BitDanceClass(BitDanceConfig.of_bitdance(state), head)

        yield same_shapes(shapes, make)

    for name, shapes in recorded.items():
        if isinstance(shapes, dict) and "pos_for_diff.weight" in shapes:
            yield Case(f"bitdance/keys.{name}", partial(checks, shapes))
    yield Case("bitdance/keys.B_16x", partial(checks, {**recorded["B_4x"], **recorded["B_16x_differs"]}))
