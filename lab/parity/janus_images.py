"""Parity cases of a Janus that reads images: how an image is prepared and read, answers to questions, and editing with
Janus-4o, recorded with the authors' code.

A folder holds ``sizes.json``, the model folder ``model``, and the folders ``understand`` and ``edit`` with images,
texts and recorded tensors. Rows of a recorded triple are the whole condition's, the partial one's and the null one's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.janus import loader
from ...model_loaders.janus.squares import box_of, squared
from ...networks.janus import JanusModel, WordHead
from ...networks.janus_vision import ImageReader, normalised
from ...runs.answers import Words, answer
from ...runs.loading import read_images
from ...runs.registry import FAMILIES, JANUS
from ...samplers.conditioning import ImagePromptCondition
from ...samplers.engine import finish
from ...samplers.tokens.cache_slots import serial_slots
from ...samplers.tokens.canvas import token_canvas
from ...samplers.tokens.llamagen import llamagen
from ...samplers.tokens.looks import CachedTransformer, DeviceTable
from ...samplers.tokens.prepare import prepare
from ...samplers.tokens.schedule import raster
from ...samplers.tokens.settings import LlamaGenSettings, TokenSettings
from .cases import Case, Check, exact, gathered, read_json, read_tensors
from .janus import Gumbel

SIZES = "sizes.json"
# Largest absolute differences, see the folder's README.
READ, LOGITS, GUIDED, ANSWERS = 1e-5, 1e-5, 1e-4, 2e-5
Tensors = Mapping[str, Tensor]
_RUN = re.compile(r"(e\d)\.cfg([\d.]+)_w([\d.]+)(?:_t([\d.]+))?\.tokens")
_SAMPLED = re.compile(r"(sample\.t([\d.]+)_p([\d.]+)(_unset_k)?)\.tokens")
_REAL_SIDE = 384
_PLACE = "<image_placeholder>"


def cases(folder: Path) -> list[Case]:
    """The cases of a folder; weights are read when a case runs."""
    out: list[Case] = []
    if not (folder / SIZES).is_file() or not (folder / "model").is_dir():
        return out

    if (folder / "understand/io.safetensors").is_file():
        out += gathered("janus_images/understand", lambda: _reading(folder))
    if (folder / "edit/io.safetensors").is_file():
        out += gathered("janus_images/edit", lambda: _editing(folder))
    return out


@lru_cache(maxsize=2)
def _loaded(folder: Path) -> tuple[JanusModel, ImageReader]:
    sizes = read_json(folder / SIZES)
    model = replace(loader.load_janus(folder / "model", "fp32"), grid=sizes["grid"])
    vq = loader.load_janus_vq(folder / "model", "fp32")
    return model, loader.load_janus_vision(folder / "model", vq, "fp32", heads=sizes["sig"]["heads"])


def _pixels(path: Path) -> Tensor:
    """An image file as uint8 [H, W, 3]."""
    import numpy as np
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(path).convert("RGB")))


# ------------------------------------------------------------------------------------------------ images


def _reading(folder: Path) -> Iterator[Case]:
    """Images of real sizes, tiny ones, and what the tower and the aligner make of these."""
    io = read_tensors(folder / "understand/io.safetensors")
    texts = read_json(folder / "understand/texts.json")

    def real(i: int) -> Iterator[Check]:
        pixels = _pixels(folder / f"understand/real_{i}.png")
        square = squared(pixels, _REAL_SIDE).permute(2, 0, 1).int()
        yield exact(square.sum(2), io[f"real_{i}.checksum_rows"])
        yield exact(square.sum(1), io[f"real_{i}.checksum_columns"])
        yield exact(square[:, ::16, ::16], io[f"real_{i}.sample"])

        # The recorded box was found by its colour, which a pixel of the image's edge may have.
        left, top, right, bottom = box_of(pixels.shape[1], pixels.shape[0], _REAL_SIDE)
        found = torch.tensor(texts["real"][i]["box"])
        yield Check(torch.tensor([left, top, right, bottom]), found, 1.0)

    def tower() -> Iterator[Check]:
        net = _loaded(folder)[1].net
        embedded = net.tower.embed(io["tower.pixels"])
        yield Check(embedded, io["tower.embedded"], READ)
        yield Check(net.tower.run(embedded), io["tower.features"], READ)
        yield Check(net(io["tower.pixels"]), io["tower.aligned"], READ)

    def asked(name: str, settings: TokenSettings, key: str) -> Iterator[Check]:
        """Ids of a question, the words of the answer, their logits and the text."""
        model, _ = _loaded(folder)
        turns = texts[name]["conversation"]
        if len(turns) == 2:  # without an earlier turn, which no node has
            before, _, typed = turns[0]["content"].partition("\n")
            yield exact(torch.tensor(model.question(typed, before.count(_PLACE))), io[f"{name}.ids"])

        said, logits = _answered(folder, io, name, settings)
        yield exact(torch.tensor(said.tokens), io[f"{key}.tokens"].view(-1))
        if f"{key}.logits" in io:
            yield Check(logits, io[f"{key}.logits"], ANSWERS)
            yield Check(logits[0], io[f"{key}.prefill_logits"][-1], ANSWERS)
            yield exact(torch.tensor(said.text == texts[key]["answer"].strip()), torch.tensor(True))

    def together() -> Iterator[Check]:
        """Rows of a batch that was padded on the left have the words of single answers."""
        for row, name in zip(io["batch.tokens"], texts["batch"]["rows"], strict=True):
            said, _ = _answered(folder, io, name, _words())
            yield exact(torch.tensor(said.tokens), row[: len(said.tokens)])

    for i in range(len(texts["real"])):
        yield Case(f"janus_images/real_{i}", partial(real, i))
    yield Case("janus_images/tower", tower)
    for name in sorted(name for name in texts if re.fullmatch(r"u\d", name)):
        yield Case(f"janus_images/{name}", partial(asked, name, _words(), name))
    for m in filter(None, map(_SAMPLED.fullmatch, sorted(io))):
        settings = _words(float(m[2]), float(m[3]), 50 if m[4] else 0)
        yield Case(f"janus_images/{m[1]}", partial(asked, "u2", settings, m[1]))
    yield Case("janus_images/batch", together)


def _answered(folder: Path, io: Tensors, name: str, settings: TokenSettings) -> tuple[Words, Tensor]:
    """The answer to a recorded question, and its logits [steps, V]."""
    model, reader = _loaded(folder)
    head = _head(folder)
    logits: list[Tensor] = []
    hook = head.register_forward_hook(lambda *about: logits.append(about[-1][0, 0]))

    rows = list(reader.net(io[f"{name}.pixels"]))
    noise = Gumbel(io["sample.gumbel"])
    limit = noise.table.shape[1]
    said = finish(answer(model, head, rows, io[f"{name}.ids"].tolist(), settings, limit, noise))
    hook.remove()
    return said, torch.stack(logits)


def _words(temperature: float = 0, top_p: float = 1, top_k: int = 0) -> TokenSettings:
    return TokenSettings(cfg=1.0, temperature=temperature, top_k=top_k, top_p=top_p)


@lru_cache(maxsize=2)
def _head(folder: Path) -> WordHead:
    return loader.load_janus_head(folder / "model", "fp32")


# ------------------------------------------------------------------------------------------------ editing


def _editing(folder: Path) -> Iterator[Case]:
    """Images as pixels, rows and codes; prompts; editing."""
    io = read_tensors(folder / "edit/io.safetensors")
    texts = read_json(folder / "edit/texts.json")

    def image(i: int) -> Iterator[Check]:
        model, reader = _loaded(folder)
        square = squared(_pixels(folder / f"edit/input_{i}.png"), reader.side, reader.least)
        pixels = normalised(square)
        yield exact(pixels, io["pixels"][i])
        yield Check(reader.vq.net.features(pixels[None])[0], io[f"encoded_{i}"], READ)

        codes = io[f"codes_{i}"].flatten()
        yield exact(reader.read(square).codes, codes)
        yield Check(model.net.tok_embeddings(codes), io[f"code_embeds_{i}"], READ)

    def prompt(name: str) -> Iterator[Check]:
        model, condition = _condition(folder, texts[name], 1)
        prepared = prepare(model, condition, torch.device("cpu"))
        ids = prepared.entries
        yield exact(ids[0], io[f"{name}.rows"][0])
        yield exact(model.net.null_prompts(ids, None)[0], io[f"{name}.rows"][2])
        if f"{name}.embeds" in io:
            rows = prepared.prefix(model.net, null=True)
            yield Check(rows, io[f"{name}.embeds"], READ)
            hidden, _ = model.net.prefill(rows, model.grid, model.tokens)
            yield Check(model.net.logits(hidden)[:, 0], io[f"{name}.prefill_logits"], LOGITS)

    def run(name: str, cfg: float, w: float, temperature: str | None) -> Iterator[Check]:
        expected = io[f"{name}.tokens"].view(-1, _loaded(folder)[0].tokens)
        model, condition = _condition(folder, texts[name.partition(".")[0]], len(expected))
        table = io["gumbel"] if temperature else torch.zeros(1, model.tokens, model.net.config.vocab)
        settings = LlamaGenSettings(cfg=cfg, temperature=float(temperature or 0), top_k=0)

        for parallel in (0, 3):
            run = llamagen(model, replace(condition, freedom=w), replace(settings, parallel=parallel), Gumbel(table))
            yield exact(finish(run).latents.flatten(1), expected)

        logits = _branches(model, condition, expected)
        if f"{name}.logits" in io:
            yield Check(logits[:, 0], io[f"{name}.logits"], LOGITS)
        whole, part, null = logits
        guided = null + cfg * ((whole + w * part) / (1 + w) - null)
        if temperature:
            yield Check(guided / float(temperature), io[f"{name}.guided_over_t"], GUIDED)
        else:
            yield Check(guided[0], io[f"{name}.guided"], GUIDED)

        if f"{name}.image" in io:
            image = _loaded(folder)[1].vq.net.decode_codes(expected.view(-1, model.grid, model.grid))
            yield Check(image, io[f"{name}.image"], READ)
            whole = ((image + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            yield exact(whole, io[f"{name}.image_u8"])

    for i in range(len(io["pixels"])):
        yield Case(f"janus_images/input_{i}", partial(image, i))
    for name in sorted(texts):
        yield Case(f"janus_images/{name}.prompt", partial(prompt, name))
    for m in filter(None, map(_RUN.fullmatch, sorted(io))):
        name = m[0].removesuffix(".tokens")
        yield Case(f"janus_images/{name}", partial(run, name, float(m[2]), float(m[3]), m[4]))


def _condition(folder: Path, text: Any, count: int) -> tuple[JanusModel, ImagePromptCondition]:
    """The model, and the condition of so many images of a recorded prompt, read."""
    model, reader = _loaded(folder)
    pixels = _pixels(folder / "edit" / text["picture"])
    condition = ImagePromptCondition((text["prompt"],) * count, (pixels,) * count)
    return model, read_images(condition, reader, FAMILIES[JANUS])


def _branches(model: JanusModel, condition: ImagePromptCondition, tokens: Tensor) -> Tensor:
    """Teacher-forced logits [3, B, N, V] of all branches, by the passes of serial decoding."""
    draws = Gumbel(torch.zeros(len(tokens), model.tokens, model.net.config.vocab))
    canvas, prepared = token_canvas("verify", model, condition, TokenSettings(), draws)
    canvas.values[:, :-1] = tokens
    look = CachedTransformer(canvas, prepared)
    schedule = raster(model.grid)
    slots = serial_slots(schedule)
    hidden = [look.prefill(True, slots.count)]
    table = DeviceTable(schedule, slots, look.cache.prefix, tokens.device)

    for k in range(1, len(schedule.passes)):
        hidden.append(look.feed(canvas.values, table.pass_rows(k)[0], True))

    return model.net.logits(torch.cat(hidden, 1)).unflatten(0, (3, -1))
