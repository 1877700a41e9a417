"""Random weights of tiny models and their autoencoders in files, and the command line as a function."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from fastar_nodes.cli.main import main
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.model_loaders.networks.mar import MAR
from tiny_files import GPT_SIZE, MAR_SIZE, write, write_gpt, write_vq


class Files(NamedTuple):
    mar: Path
    kl: Path
    llamagen: Path
    par: Path
    vq: Path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("weights")
    kl = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4))
    return Files(
        write(
            MAR(MAR_SIZE),
            folder / "tiny.safetensors",
            1,
            heads=2,
            latent_scale=1.0,
            t_max=950,
            label_set="picture-book",
            name="tiny mar",
        ),
        write(kl, folder / "tiny-kl.safetensors", 2, groups=4, name="tiny kl"),
        write_gpt(folder / "llamagen.safetensors", 3),
        write_gpt(folder / "par.safetensors", 4, config=replace(GPT_SIZE, special=3)),
        write_vq(folder / "vq.safetensors"),
    )


@pytest.fixture
def tiny_demo(files: Files, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny models in the place of the built-in ones; the larger LlamaGen has twice the PAR's grid. Gives their folder."""
    monkeypatch.setattr(hub, "_PACKAGE", tmp_path_factory.mktemp("package"))
    folder = hub._PACKAGE / "demo" / "checkpoints"
    folder.mkdir(parents=True)
    here = {"mar": files.mar, "kl": files.kl, "vq": files.vq, "par": files.par, "llamagen-low": files.llamagen}
    for name, file in here.items():
        shutil.copy(file, folder / f"{name}.safetensors")
    write_gpt(folder / "llamagen.safetensors", 5, 8)
    return folder


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in an empty folder; its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> Answer:
        try:
            code = main([str(a) for a in argv])
        except SystemExit as e:  # raised by argparse
            code = e.code
        return Answer(code, *capsys.readouterr())

    return run


def one_sentence(answer: Answer) -> str:
    """The message on bad input: exit code 2, one line, no traceback, nothing on stdout."""
    assert answer.code == 2, answer
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].endswith((".", "!", "?")), answer.err
    assert "Traceback" not in answer.err
    return lines[0]


@pytest.fixture
def sentence() -> Callable[[Answer], str]:
    return one_sentence
