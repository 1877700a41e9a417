"""Sweeps on tiny random models in files, for tests in this process and in others."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastar_nodes.lab.sweeps.records import Cell
from fastar_nodes.lab.sweeps.spec import Spec, from_table
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.tasks import draw, tasks_of, unfinished
from fastar_nodes.lab.sweeps.work import Conditions, Models, Worker, manifest, numerics, plan, use
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.mar import MAR
from fastar_nodes.runs.loading import Source, find_file
from tiny_files import MAR_SIZE, write, write_gpt, write_vq

SETTINGS = {"steps": 4, "diffusion_steps": 4, "fasthybrid.lookahead": 2, "fasthybrid.threshold": [0.5, 0.9]}


class Files(NamedTuple):
    mar: Path
    kl: Path
    llamagen: Path
    vq: Path


def write_mar(path: Path, seed: int) -> Path:
    about = {"latent_scale": 1.0, "t_max": 950, "label_set": "picture-book", "name": f"tiny mar {seed}"}
    return write(MAR(MAR_SIZE), path, seed, heads=2, **about)


def write_files(folder: Path) -> Files:
    """A MAR and a LlamaGen with their decoders."""
    kl = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4))
    mar, vq = write_mar(folder / "tiny.safetensors", 1), write_vq(folder / "vq.safetensors")
    kl = write(kl, folder / "tiny-kl.safetensors", 2, groups=4, name="tiny kl")
    return Files(mar, kl, write_gpt(folder / "llamagen.safetensors", 3, 8), vq)


def table(files: Files, **more: Any) -> dict[str, Any]:
    """Three cells on the MAR: the plain sampler and two thresholds, 8 images of each in shards of 2."""
    usual = {"model": str(files.mar), "decoder": str(files.kl), "samplers": ["mar", "fasthybrid"], "set": SETTINGS}
    return {**usual, "images": 8, "batch": 2, "threads": 1, **more}


def write_spec(path: Path, **table_: Any) -> Path:
    path.write_text(json.dumps(table_), encoding="utf-8")
    return path


def source(spec: Spec, folder: Path = Path("/nowhere")) -> Source:
    return Source(lambda choice, family: find_file(choice, family, folder), torch.device("cpu"), spec.dtype)


def begin(address: object, entries: dict[str, Any]) -> tuple[Store, list[Cell], Worker]:
    """A planned sweep and a worker for it."""
    spec = from_table(entries)
    files = source(spec)
    numbers = numerics(spec, files)
    use(numbers)
    models = Models(spec, files)
    conditions = Conditions(spec, models)
    store = Store(address)
    cells = plan(spec, models, conditions, numbers)
    store.write_manifest(manifest(spec, numbers), cells)
    return store, cells, Worker(store, models, conditions)


def lasting(folder: Path) -> dict[str, bytes]:
    """The files of a sweep that do not differ from run to run, by name; without those that killed writers left."""
    every = (p for p in sorted((folder / "cells").rglob("*")) if p.is_file() and not p.name.startswith("."))
    found = (p for p in every if not p.name.endswith(".time.json"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def finish(folder: Path, entries: dict[str, Any], **parts: int) -> tuple[Store, list[tuple[str, int]]]:
    """Draw what is left; the store and (cell, first image) of what this call drew."""
    store, cells, worker = begin(folder, entries)
    tasks, _ = unfinished(store, tasks_of(store, cells, **parts))
    return store, [(name, shard.first) for name, shard in draw(worker, tasks)]


def undisturbed(folder: Path, entries: dict[str, Any]) -> dict[str, bytes]:
    """The lasting files of a run in one process."""
    finish(folder, entries)
    return lasting(folder)


def command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "fastar_nodes.lab", "sweep", *map(str, argv)]
