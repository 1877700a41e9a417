"""The papers' files on tiny random models in place of the catalogue's, with few steps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fastar_nodes.lab.sweeps.spec import read_table
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.llama import Llama
from fastar_nodes.networks.mar import MAR
from qwen_reference import tiny_qwen
from tar_files import CONFIG, IDS, tiny_ta_tok, words
from tiny_files import GPT_SIZE, MAR_SIZE, READER, save, write, write_gpt, write_vq

# Catalogue entries of LlamaGens, PARs and de-tokenizers, to the side of their tiny grid.
GPTS = {"llamagen-xxl-384": 8}
PARS = {"par-xl-4x": 3, "par-xxl-4x": 3, "par-3b-4x": 3, "par-3b-16x": 15}  # transition tokens
TEXTS = {"llamagen-t2i-xl-256": 2, "llamagen-t2i-xl-512": 4}
DETOKENIZERS = {"ar-dtok-256": 2, "ar-dtok-512": 4, "ar-dtok-1024": 8}
MARS = ("mar-base-ema", "mar-large", "mar-huge")
TEXT_WIDTH = 6


def write_models(folder: Path) -> dict[str, Path]:
    """A tiny file for every catalogue entry that the papers' files need, by its id, and for their decoders."""
    made = {}

    def path(name: str) -> Path:
        made[name] = folder / f"{name}.safetensors"
        return made[name]

    for seed, name in enumerate(MARS):
        write(MAR(MAR_SIZE), path(name), seed, heads=2, latent_scale=1.0, name=f"tiny {name}")
    kl = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4))
    made["kl16"] = made["kl16-original"] = write(kl, folder / "kl.safetensors", 2, groups=4)

    full = {"label_set": "", "defaults": {}}  # without the demo's settings
    for name, grid in GPTS.items():
        write_gpt(path(name), 3, grid, **full)
    for name, special in PARS.items():
        write_gpt(path(name), 4, 8, replace(GPT_SIZE, special=special), **full)
    text = replace(GPT_SIZE, condition="text", condition_size=TEXT_WIDTH, text_rows=8)
    for name, grid in TEXTS.items():
        write_gpt(path(name), 5, grid, text, **full)
    made["vq16-c2i"] = made["vq16-t2i"] = write_vq(folder / "vq.safetensors")

    for name, grid in DETOKENIZERS.items():
        config = replace(GPT_SIZE, condition="features", condition_size=24, absolute=16 + grid**2 - 1)
        write(Llama(config), path(name), grid, heads=2, grid=grid, name=f"tiny {name}")
    language = {"config": {**CONFIG, **IDS}, "tokenizer": words(), "defaults": {"top_k": 15}}
    made["tar-1.5b"] = made["tar-7b"] = save(folder / "tar.safetensors", {"": tiny_qwen().state_dict()}, **language)
    save(path("ta-tok"), {"": tiny_ta_tok(READER).state_dict()})
    made["flan-t5-xl"] = made["ta-tok"]  # the text encoder below reads no file

    return made


class TextEncoder:
    """In place of FLAN-T5: a row of ones for each word."""

    def encode(self, prompts: list[str]) -> list[torch.Tensor]:
        return [torch.ones(len(prompt.split()), TEXT_WIDTH) for prompt in prompts]


# Numbers of steps in the papers' files, to those of a test. They differ where those of the papers do.
STEPS = {256: 4, 64: 8, 32: 4, 18: 5, 17: 4, 16: 2}
DIFFUSION_STEPS = {100: 3, 50: 2, 30: 1}
DIFFUSION_STEPS_END = {20: 1, 5: 1}


def with_few_steps(paper: Path, written: Path) -> Path:
    """Write a paper's file with fewer steps, as JSON."""
    table = read_table(paper)
    for part in (table, *table["sweeps"]):
        settings = part.get("set", {})
        for name, value in settings.items():
            if name == "draft_rows":
                settings[name] = 1  # of 2, so that a draft goes on from the result
            elif name.rpartition(".")[2] == "steps":
                settings[name] = STEPS[value]
            elif name.rpartition(".")[2] == "diffusion_steps":
                settings[name] = DIFFUSION_STEPS[value]
            elif name.rpartition(".")[2] == "diffusion_steps_end":
                settings[name] = DIFFUSION_STEPS_END[value]

    written.write_text(json.dumps(table), encoding="utf-8")
    return written


def finder(models: dict[str, Path]) -> Callable[..., Path]:
    """In place of :func:`fastar_nodes.runs.loading.find_file`: the tiny file of a catalogue entry."""

    def find(choice: str, family: str, *_: Any) -> Path:
        return models[choice]

    return find
