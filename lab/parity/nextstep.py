"""Parity cases of NextStep, recorded with the authors' programs: autoencoder, tokens, head, sampling of a token,
language model, whole generations, edits of images, prompts and parameter names.

A folder holds ``nextstep_meta.json`` with the runs, the recorded files named below, the model ``model``, and
``tokenizer_bos`` with another tokenizer of it. Recorded rows are those of all images, branch by branch.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...model_loaders.files import checkpoint as ck
from ...model_loaders.files.shards import weight_files
from ...model_loaders.files.tokenizer import load_tokenizer
from ...model_loaders.nextstep import loader
from ...model_loaders.nextstep.sources import cropped
from ...networks.autoencoder import KLConfig
from ...networks.llama import attend
from ...networks.nextstep import (
    FlowHead,
    LatentConfig,
    Marks,
    NextStep,
    NextStepAutoencoder,
    NextStepConfig,
    NextStepModel,
    ReadSource,
    Rows,
    to_latents,
    to_tokens,
)
from ...reports.record import Report
from ...samplers import chain, diffusion_steps
from ...samplers.chain import MODULATION_BUDGET
from ...samplers.conditioning import PromptCondition
from ...samplers.engine import finish
from ...samplers.nextstep.canvas import branches_for_texts, nextstep_canvas
from ...samplers.nextstep.flow import flow
from ...samplers.nextstep.nextstep import tokens_one_by_one
from ...samplers.nextstep.settings import CONSTANT, FALLING, RISING, NextStepSettings
from ...samplers.noise import PairedNoise
from .cases import Case, Check, Known, exact, from_files, read_json, read_tensors, same_shapes

META = "nextstep_meta.json"
IO, EDITS = "nextstep_io.safetensors", "nextstep_edit_io.safetensors"
WORDS, REAL_WORDS = "nextstep_prompts.json", "nextstep_prompts_real.json"
KEYS = "nextstep_keys_14b.json"
MODEL, WITH_START, REAL = "model", "tokenizer_bos", "tokenizer_real"
# Largest differences of hidden rows and conditions, of samples of a token without guidance and with it, of whole
# generations likewise, of their images, and of latents of sources.
INSIDE, PLAIN, GUIDED, RUN, GUIDED_RUN, IMAGE, SOURCE = 1e-5, 1e-5, 5e-5, 5e-5, 4e-3, 1e-3, 3e-5
# Share of the 8-bit numbers that may be one level off.
ONE_OFF = 1 / 50
Tensors = Mapping[str, Tensor]
About = Mapping[str, Any]


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: Known = {
        IO: ((META,), _io),
        EDITS: ((META,), _edits),
        WORDS: ((), _prompts),
        REAL_WORDS: ((), _real_prompts),
        KEYS: ((), _names),
    }
    return from_files(folder, known, "nextstep")


@lru_cache(maxsize=4)
def _model(folder: Path, with_start: bool = False) -> NextStepModel:
    """The model in fp32; ``with_start``: with the tokenizer whose rows begin with a token of their own."""
    model = loader.load_nextstep(folder / MODEL, "fp32")
    if not with_start:
        return model

    tokenizer = load_tokenizer(folder / WITH_START, "", {}, words=True)
    named = tokenizer.special_tokens
    start = read_json(folder / WITH_START / "tokenizer_config.json")["bos_token"]
    return replace(model, tokenize=tokenizer.encode, marks=replace(model.marks, text=named[start]))


@lru_cache(maxsize=4)
def _autoencoder(folder: Path) -> NextStepAutoencoder:
    """The autoencoder in fp32."""
    found = loader.autoencoder_path(folder / MODEL)
    assert found is not None, "the autoencoder is missing"
    net = loader.load_nextstep_ae(found, "fp32").net
    assert isinstance(net, NextStepAutoencoder), "made by its loader"
    return net


class RecordedNoise(PairedNoise):
    """Recorded noise: start [L, B, T] and steps [L, drawn, B, T], as many of the steps as draw any."""

    def __init__(self, start: Tensor, steps: Tensor | None):
        self.images = tuple(range(start.shape[1]))
        self._start = start.transpose(0, 1)
        self._steps = None if steps is None else steps.permute(2, 1, 0, 3)

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._start

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        images, cells, numbers = self._start.shape
        out = torch.zeros(images, count, cells, numbers)
        if self._steps is not None:
            out[:, : self._steps.shape[1]] = self._steps
        return out


@contextmanager
def watched(head: FlowHead) -> Iterator[list[Tensor]]:
    """The conditions [R, D] of every token that a head reads."""
    seen: list[Tensor] = []
    hook = head.cond_embed.register_forward_pre_hook(lambda layer, args: seen.append(args[0].flatten(0, -2)))
    try:
        yield seen
    finally:
        hook.remove()


def _ids(io: Tensors, name: str) -> list[list[int]]:
    """Recorded token ids of all rows, without their padding."""
    rows = zip(io[f"{name}.ids"], io[f"{name}.mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def _same_ids(found: list[list[int]], expected: list[list[int]]) -> Check:
    """Whether rows have the same token ids."""
    return exact(torch.tensor([int(found != expected)]), torch.zeros(1))


def _same_pixels(image: Tensor, expected: Tensor) -> Iterator[Check]:
    """At most one level of difference, in few numbers."""
    pixels = ((image / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
    levels = (pixels - expected.float()).abs()
    yield Check(levels, torch.zeros_like(levels), 1.0)
    yield Check((levels > 0).float().mean(), torch.tensor(0.0), ONE_OFF)


# ------------------------------------------------------------------------------------------------ parts


def _io(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / IO)
    runs = read_json(folder / META)["runs"]
    for name, checks in {"s1": _latents, "s2": _tokens, "s3": _velocities, "s5": _hidden}.items():
        yield Case(f"nextstep/{name}", partial(checks, folder, io))

    for name, about in runs.items():
        if name.startswith("s4."):
            yield Case(f"nextstep/{name}", partial(_sampling, folder, io, name, about))
        elif name.startswith("s6."):
            yield Case(f"nextstep/{name}", partial(_generation, folder, io, name, about))


def _latents(folder: Path, io: Tensors) -> Iterator[Check]:
    """The autoencoder: decoder, encoder, and the norms of its mean."""
    net = _autoencoder(folder)
    c = net.config
    for name in ("", "_rect"):
        yield Check(net.decoder(io[f"s1.latents{name}"]), io[f"s1.image{name}"], INSIDE)
        scaled = (io[f"s1.latents{name}"] - c.shift) * c.scaling
        yield Check(net.decode(scaled), io[f"s1.image{name}"], INSIDE)
    yield Check(net.encoder(io["s1.pixels"]), io["s1.encoder"], INSIDE)

    def encoded(norm_patch: int) -> tuple[Tensor, Tensor]:
        """Mean and std before they are scaled."""
        other = NextStepAutoencoder(replace(c, norm_patch=norm_patch, scaling=1.0, shift=0.0))
        other.load_state_dict(net.state_dict())
        return other.eval().encode(io["s1.pixels"])

    for name, norm_patch in {"plain": 0, "norm": 1, "psz1": 1, "psz2": 2}.items():
        mean, std = encoded(norm_patch)
        yield Check(mean, io[f"s1.mean.{name}"], INSIDE)
        yield Check(std, io["s1.std"], INSIDE)

    mean, std = net.encode(io["s1.pixels"])
    sample = (mean + std * io["s1.sample_noise"]) / c.scaling + c.shift
    yield Check(sample, io["s1.sample"], INSIDE)


def _tokens(folder: Path, io: Tensors) -> Iterator[Check]:
    """The order of the numbers of a token, both ways, and its row."""
    model = _model(folder)
    latents = io["s2.latents"]
    patch = model.net.config.patch
    yield exact(to_tokens(latents, patch), io["s2.tokens"])
    grid = (latents.shape[2] // patch, latents.shape[3] // patch)
    yield exact(to_latents(io["s2.tokens"], grid, patch), latents)
    yield Check(model.net.embed(io["s2.tokens"]), io["s2.embeds"], INSIDE)


def _velocities(folder: Path, io: Tensors) -> Iterator[Check]:
    """The head."""
    head = _model(folder).net.head
    yield Check(head.times(io["s3.t"]), io["s3.time"], INSIDE)
    yield Check(head.cond_embed(io["s3.c"]), io["s3.cond"], INSIDE)
    yield Check(head(io["s3.x"], io["s3.t"], io["s3.c"]), io["s3.v"], INSIDE)


def _sampling(folder: Path, io: Tensors, name: str, about: About) -> Iterator[Check]:
    """The flow of a token."""
    net = _model(folder).net
    start = io[f"{name}.start"]
    noise = torch.zeros(about["steps"], *start.shape)
    recorded = io.get(f"{name}.noise", noise)
    noise[: len(recorded)] = recorded

    made = flow(about["sampler"], about["steps"], about["shift"])
    table = diffusion_steps.step_table(made.steps, net.head.times(torch.tensor(made.times)))
    scales = torch.tensor([about["cfg"], about["cfg_img"]][: max(1, about["rows"] - 1)])
    z = io[f"{name}.c"].unflatten(0, (about["rows"], -1))
    rows = chain.DiffusionBatch(z, scales.expand(len(start), -1), start, noise, table)
    head = chain.FullChainHead(
        net, net.head, rows, Report("verify", "", {}, None, len(start), "cpu"), MODULATION_BUDGET
    )
    *_, last = chain.run_chain(rows, head)
    yield Check(last.x, io[f"{name}.out"], PLAIN if about["cfg"] == 1 else GUIDED)


def _hidden(folder: Path, io: Tensors) -> Iterator[Check]:
    """The language model: prompts of two lengths, then given tokens, one in each pass and all in one."""
    model = _model(folder)
    net = model.net
    ids = _ids(io, "s5")
    expected = io["s5.hidden"]
    count = expected.shape[1]
    mask = io["s5.mask"].bool()

    for branch, own in enumerate(ids):
        rows = net.tok_embeddings(torch.tensor([own]))
        place = torch.arange(len(own))[None]
        hidden = net.hidden(rows, place, lambda i, q, k, v: attend(q, k, v, causal=True))[0]
        yield Check(hidden, io["s5.prefill"][branch][mask[branch]], INSIDE)
        # The output layer for words is in the file, and is not read for images.
        words = _whole(folder)["lm_head.weight"].float()
        yield Check(words @ hidden[-1], io["s5.logits"][branch], INSIDE)

        tokens = net.embed(io["s5.tokens"][branch : branch + 1])
        place = torch.arange(len(own) + count)[None]
        hidden = net.hidden(torch.cat([rows, tokens], 1), place, lambda i, q, k, v: attend(q, k, v, causal=True))
        yield Check(hidden[0, len(own) :], expected[branch], INSIDE)

    prefix, lengths = model.prefix(Rows(ids, [None] * len(ids)), count)
    conditions, cache = net.begin(prefix, lengths, count)
    found = [conditions]
    for i in range(count - 1):
        found.append(net.advance(io["s5.tokens"][:, i : i + 1], i, cache))
    yield Check(torch.cat(found, 1), io["s5.c"], INSIDE)

    together = net.advance(io["s5.tokens"][:, : count - 1], 0, cache)
    yield Check(together[:, 0], io["s5.c"][:, -1], INSIDE)


def _whole(folder: Path) -> dict[str, Tensor]:
    """All weights of the model's files."""
    shards = weight_files(folder / MODEL, "checkpoint", "a NextStep")
    return ck.read(folder / MODEL, shards=shards).state


# ------------------------------------------------------------------------------------------------ whole generations


def _settings(about: About) -> NextStepSettings:
    """The settings of a recorded generation; its linear guidance falls in one program and rises in the other."""
    linear = FALLING if about["sampler"] in ("em", "em0") else RISING
    return NextStepSettings(
        diffusion_steps=about["steps"],
        cfg=about["cfg"],
        cfg_img=about["cfg_img"],
        width=about["width"],
        height=about["height"],
        cfg_schedule=CONSTANT if about["schedule"] == "constant" else linear,
        solver=about["sampler"],
        time_shift=about["shift"],
        use_norm=about["use_norm"],
    )


def _generation(
    folder: Path, io: Tensors, name: str, about: About, sources: list[ReadSource] | None = None
) -> Iterator[Check]:
    """A whole recorded generation: rows, conditions, tokens and image; ``sources`` of every row with an image."""
    model = _model(folder, about["bos"])
    settings = _settings(about)
    noise = RecordedNoise(io[f"{name}.start"], io.get(f"{name}.noise"))
    images = about["images"]
    text = " ".join(filter(None, (about["prompt"].replace("<image>", "", 1), about["positive"])))
    canvas = nextstep_canvas(model, PromptCondition((text,) * images), settings, noise, None)

    own = [None] * images if sources is None else sources[:images]
    branches = branches_for_texts(model, (text,) * images, about["negative"] or "", own, settings, canvas.grid)
    if sources is not None:
        rest = [None] * (len(branches.rows.ids) - len(sources))
        # The authors' programs read an image for every row with noise of its own.
        branches = branches._replace(rows=branches.rows._replace(sources=[*sources, *rest]))
    canvas = replace(canvas, branches=branches)
    yield _same_ids(branches.rows.ids, _ids(io, name))

    with watched(model.net.head) as seen:
        out = finish(tokens_one_by_one(canvas))
    tolerance = RUN if about["cfg"] == 1 else GUIDED_RUN
    yield Check(torch.stack(seen), io[f"{name}.cond"], tolerance)
    yield Check(to_tokens(out.latents, model.net.config.patch), io[f"{name}.tokens"], tolerance)

    net = _autoencoder(folder)
    c = net.config
    yield Check(out.latents / c.scaling + c.shift, io[f"{name}.latents"], tolerance)
    image = net.decode(out.latents)
    yield Check(image, io[f"{name}.image"], RUN if about["cfg"] == 1 else IMAGE)
    yield from _same_pixels(image, io[f"{name}.image_u8"])


def _edits(folder: Path) -> Iterator[Case]:
    io = read_tensors(folder / EDITS)
    runs = read_json(folder / META)["runs"]
    for name, about in runs.items():
        if name[0] == "e":
            yield Case(f"nextstep/{name}", partial(_edit, folder, io, name, about))
    for name in sorted({key.partition(".")[0] for key in io if key.startswith("prep_")}):
        yield Case(f"nextstep/{name}", partial(_prepared, folder, io, name))


def _edit(folder: Path, io: Tensors, name: str, about: About) -> Iterator[Check]:
    """An image that is changed: its latents, whose noise the authors' programs draw for every row, and the result."""
    net = _autoencoder(folder)
    patch = _model(folder).net.config.patch
    picture = f"input_{about['picture']}"
    pixels = np.asarray(Image.open(folder / f"{picture}.png").convert("RGB"))
    normalised = (torch.from_numpy(pixels.copy()).float() / 255 - 0.5) / 0.5
    yield exact(normalised.movedim(-1, 0), io[f"{picture}.pixels"])

    mean, std = net.encode(io[f"{picture}.pixels"][None])
    latents = mean + std * io[f"{name}.posterior_noise"]
    yield Check(latents, io[f"{name}.source"], SOURCE)

    _, _, height, width = latents.shape
    grid = (height // patch, width // patch)
    sources = [ReadSource(tokens, grid) for tokens in to_tokens(latents, patch)]
    yield from _generation(folder, io, name, about, sources)


def _prepared(folder: Path, io: Tensors, name: str) -> Iterator[Check]:
    """An image that is cut to a square. One that was stretched to a square of that size stays as it is."""
    pixels = torch.from_numpy(np.asarray(Image.open(folder / f"{name}.png").convert("RGB")).copy())
    side = len(io[f"{name}.center"])
    yield exact(cropped(pixels, side), io[f"{name}.center"])
    stretched = Image.fromarray(pixels.numpy()).resize((side, side), Image.Resampling.BICUBIC)
    yield exact(cropped(torch.from_numpy(np.array(stretched)), side), io[f"{name}.stretched"])


# ------------------------------------------------------------------------------------------------ words and names


def _prompts(folder: Path) -> Iterator[Case]:
    recorded = read_json(folder / WORDS)

    def checks(with_start: bool) -> Iterator[Check]:
        model = _model(folder, with_start)
        name = WITH_START if with_start else MODEL
        start = [] if model.marks.text is None else [model.marks.text]
        for about in recorded[name]:
            yield _same_ids([[*start, *model.prompt(about["prompt"])]], [about.get("ids_plain", about["ids"])])
        for grid, ids in recorded["prefix"][name].items():
            yield _same_ids([model.row([], _grid(grid))], [[*start, *ids]])
        for grid, ids in recorded["source"].items():
            row = model.row([], (1, 1), _grid(grid))
            yield _same_ids([row[len(start) : len(start) + len(ids)]], [ids])

    yield Case("nextstep/prompts", partial(checks, False))
    yield Case("nextstep/prompts.bos", partial(checks, True))


def _grid(text: str) -> tuple[int, int]:
    """The height and width of "4*6"."""
    height, width = map(int, text.split("*"))
    return height, width


def _real_prompts(folder: Path) -> Iterator[Case]:
    """Prompts in Qwen2.5's own words; "not yet" without its tokenizer in a folder ``tokenizer_real``."""
    recorded = read_json(folder / REAL_WORDS)

    def checks() -> Iterator[Check]:
        marks = recorded["marks"]
        encode = load_tokenizer(folder / REAL, "", {}, words=True).encode
        own = Marks(*(marks[name] for name in ("<|image_area|>", *loader.STATED_IDS.values())))
        model = replace(_model(folder), tokenize=encode, marks=own)
        texts = [*recorded["prompts"], recorded["negative"], recorded["positive"]]
        for about in texts:
            yield _same_ids([encode(about.get("prompt", about.get("text")))], [about.get("ids_plain", about["ids"])])
        for grid, ids in recorded["prefix"].items():
            yield _same_ids([model.row([], _grid(grid))], [ids])
        for grid, ids in recorded["source"].items():
            yield _same_ids([model.row([], (1, 1), _grid(grid))[: len(ids)]], [ids])

    there = (folder / REAL).is_dir() and importlib.util.find_spec("tokenizers") is not None
    yield Case("nextstep/prompts.real", checks if there else None)


def _names(folder: Path) -> Iterator[Case]:
    """Names and shapes of the published sizes, in both halves of a folder."""
    recorded = read_json(folder / KEYS)

    def model() -> Iterator[Check]:
        shapes = {name: shape for name, shape in recorded["model"].items() if not loader.UNUSED.search(name)}
        yield same_shapes(shapes, lambda state: NextStep(NextStepConfig.of_nextstep(state)))

    def autoencoder() -> Iterator[Check]:
        def make(state: dict[str, Tensor]) -> NextStepAutoencoder:
            return NextStepAutoencoder(LatentConfig(**vars(KLConfig.from_state_dict(state))))

        yield same_shapes(recorded["vae"], make)

    yield Case("nextstep/keys.14b", model)
    yield Case("nextstep/keys.autoencoder", autoencoder)
