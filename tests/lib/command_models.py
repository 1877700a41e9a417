"""Random weights of tiny models and their autoencoders in files, in fixtures of the tests of commands."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import hybrid_files
import pytest
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.llama import Llama
from fastar_nodes.networks.mar import MAR
from qwen_reference import tiny_qwen
from tar_files import CONFIG, IDS, tiny_ta_tok, words
from tiny_files import GPT_SIZE, MAR_SIZE, READER, save, write, write_gpt, write_vq


class Files(NamedTuple):
    """Tar draws 16 codes of 20 at 4 x 4 (low) and 8 x 8 (high)."""

    mar: Path
    kl: Path
    hybrid: Path
    llamagen: Path
    par: Path
    vq: Path
    tar: Path
    ta_tok: Path
    low: Path
    high: Path


def detokenizer(grid: int) -> Llama:
    return Llama(replace(GPT_SIZE, condition="features", condition_size=24, absolute=16 + grid**2 - 1))


@pytest.fixture(scope="session")
def command_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("weights")
    made = Files(*(folder / f"{name.replace('_', '-')}.safetensors" for name in Files._fields))
    about = {"heads": 2, "latent_scale": 1.0, "t_max": 950, "label_set": "picture-book", "name": "tiny mar"}
    write(MAR(MAR_SIZE), made.mar, 1, **about)
    write(KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4)), made.kl, 2, groups=4)
    read = {**hybrid_files.METADATA, "grid": 4, "latent_scale": 1.0, "t_max": 950, "name": "tiny hybrid"}
    write(SimpleNamespace(state_dict=hybrid_files.weights), made.hybrid, 2, **read)
    write_gpt(made.llamagen, 3)
    write_gpt(made.par, 4, config=replace(GPT_SIZE, special=3))
    write_vq(made.vq)
    language = {"config": {**CONFIG, **IDS}, "tokenizer": words(), "defaults": {"top_k": 15}}
    save(made.tar, {"": tiny_qwen().state_dict()}, **language, name="tiny tar")
    save(made.ta_tok, {"": tiny_ta_tok(READER).state_dict()}, name="tiny ta-tok")
    shared = {"heads": 2, "label_set": "picture-book", "defaults": {"cfg": 2.0}, "ta_tok": "demo-ta-tok"}
    write(detokenizer(4), made.low, 11, grid=4, name="tiny low", **shared)
    write(detokenizer(8), made.high, 12, grid=8, name="tiny high", **shared)
    return made


@pytest.fixture
def tiny_demo(command_files: Files, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny models in the place of the built-in ones; the larger LlamaGen has twice the PAR's grid.
    Gives their folder.
    """
    made = command_files
    monkeypatch.setattr(hub, "_PACKAGE", tmp_path_factory.mktemp("package"))
    folder = hub._PACKAGE / "demo" / "checkpoints"
    folder.mkdir(parents=True)
    here = {
        "mar": made.mar,
        "kl": made.kl,
        "vq": made.vq,
        "par": made.par,
        "llamagen-low": made.llamagen,
    }
    here |= {
        "tar": made.tar,
        "ta-tok": made.ta_tok,
        "dtok": made.high,
        "dtok-low": made.low,
    }
    for name, file in here.items():
        shutil.copy(file, folder / f"{name}.safetensors")
    write_gpt(folder / "llamagen.safetensors", 5, 8)
    return folder
