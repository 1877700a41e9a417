"""Train the built-in demo checkpoints: the autoencoder, the MAR, its draft model and the judge; the VQ tokenizer, two
LlamaGens and the PAR, and MuLo-SD's latent samplers; TA-Tok, the Tar language model and two de-tokenizers; the hybrid,
a MAR of prompts; the binary autoencoder and the BitDance; and the parts of the three autoencoders that draw images four
times larger.

An interrupted training resumes from its state in --work. All trainings together take many hours on two CPU cores; a
GPU is faster.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...cli.options import choose_device, whole
from ...errors import UserError
from ...model_loaders.autoencoders.loader import load_kl, load_vq
from ...model_loaders.bitdance.loader import load_binary, load_bitdance
from ...model_loaders.hybrid.loader import load_hybrid
from ...model_loaders.llamagen.loader import load_llamagen
from ...model_loaders.mar.loader import load_mar
from ...model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from ...reports.files import typed_path, writable
from .. import files
from . import (
    binary_recipe,
    bitdance_recipe,
    draft_recipe,
    enlarging_recipe,
    hybrid_recipe,
    judge,
    latent_recipe,
    recipes,
    ta_tok_recipe,
    tar_recipes,
    token_recipes,
)
from .training import Job

IMPROVE = (
    "start from the existing checkpoints: MARs, LlamaGens, PAR, Tar, hybrid, BitDance; of the KL autoencoder, train "
    "only the decoder"
)
# What is added to the name of an autoencoder for the training of its part that enlarges, which is in the same file.
ENLARGING = "-enlarging"
# Loaders of the autoencoders whose decoders enlarge.
AUTOENCODERS: dict[str, Callable[..., Any]] = {"kl": load_kl, "vq": load_vq, "binary": load_binary}


def log(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Trainings:
    """One training per checkpoint; ``improve`` starts from the existing ones."""

    job: Job
    out: Path | None = None
    improve: bool = False

    def path(self, name: str) -> Path:
        """The file of a checkpoint."""
        return files.checkpoint(name.removesuffix(ENLARGING), self.out)

    def _net(self, load: Callable[..., Any], name: str) -> Any:
        """The network of a checkpoint, without the part that enlarges. Raises UserError if its file is missing."""
        if not self.path(name).is_file():
            raise UserError(f"only: {self.path(name)} is missing; train {name} first.")
        model = load(self.path(name), "fp32", self.job.device)
        if load in AUTOENCODERS.values():
            return enlarging_recipe.without_part(model.net)
        return model.hybrid if load is load_hybrid else model.net

    def _start(self, load: Callable[..., Any], name: str) -> Any:
        """The network to begin from, or None."""
        return self._net(load, name) if self.improve else None

    def kl(self) -> None:
        recipes.train_kl(self.job, self.path("kl"), self._start(load_kl, "kl"))

    def mar(self) -> None:
        kl, start = self._net(load_kl, "kl"), self._start(load_mar, "mar")
        recipes.train_mar(self.job, self.path("mar"), kl, start)

    def draft(self) -> None:
        kl, target = self._net(load_kl, "kl"), self._net(load_mar, "mar")
        start = self._start(load_mar, "mar-draft")
        draft_recipe.train_draft(self.job, self.path("mar-draft"), kl, target, start)

    def judge(self, name: str) -> None:
        judge.train_judge(self.job, self.path(name), self._net(load_kl, "kl"), name)

    def vq(self) -> None:
        token_recipes.train_vq(self.job, self.path("vq"), self._net(load_kl, "kl"))

    def gpt(self, name: str) -> None:
        recipe, path, vq = token_recipes.RECIPES[name], self.path(name), self._net(load_vq, "vq")
        token_recipes.train_gpt(self.job, path, recipe, vq, self._start(load_llamagen, name))

    def latent_samplers(self) -> None:
        vq, target = self._net(load_vq, "vq"), self._net(load_llamagen, "llamagen")
        likely = token_recipes.LikelyCodes(target, token_recipes.GRID, vq)
        images = latent_recipe.BookImages(self.job.count(latent_recipe.COUNT), token_recipes.GRID * vq.config.stride)
        ratio = token_recipes.GRID // token_recipes.LOW_GRID
        path, recipe = self.path(latent_recipe.NAME), latent_recipe.DEMO
        latent_recipe.train_latent_samplers(
            self.job, path, vq, images, ratio, recipe, latent_recipe.TOKEN, f"demo-{latent_recipe.NAME}", likely
        )

    def ta_tok(self) -> None:
        ta_tok_recipe.train_ta_tok(self.job, self.path("ta-tok"), ta_tok_recipe.TA_TOK)

    def tar(self) -> None:
        ta_tok, start = self._net(load_ta_tok, "ta-tok"), self._start(load_tar, "tar")
        tar_recipes.train_language(self.job, self.path("tar"), ta_tok, start=start)

    def detokenizer(self, name: str) -> None:
        ta_tok, vq = self._net(load_ta_tok, "ta-tok"), self._net(load_vq, "vq")
        recipe, start = tar_recipes.DETOKENIZERS[name], self._start(load_detokenizer, name)
        tar_recipes.train_detokenizer(self.job, self.path(name), recipe, ta_tok, vq, start=start)

    def hybrid(self) -> None:
        kl, start = self._net(load_kl, "kl"), self._start(load_hybrid, "hybrid")
        if start is None:
            mar, tar = self._net(load_mar, "mar"), self.path("tar")
            self._net(load_tar, "tar")
            start = hybrid_recipe.joined(mar, load_tar(tar, "fp32", self.job.device))
        hybrid_recipe.train_hybrid(self.job, self.path("hybrid"), kl, start, not self.improve)

    def binary(self) -> None:
        binary_recipe.train_binary(self.job, self.path("binary"), self._net(load_kl, "kl"))

    def enlarging(self, name: str) -> None:
        net = self._net(AUTOENCODERS[name], name)
        start = None
        if name != "kl":
            start = load_kl(self.path("kl"), "fp32", self.job.device).net
            if start.config.enlarging is None:
                raise UserError(f"only: {self.path('kl')} does not enlarge images; train kl{ENLARGING} first.")
        enlarging_recipe.train_enlarging(self.job, self.path(name), f"{name}{ENLARGING}", net, start)

    def bitdance(self) -> None:
        binary, start = self._net(load_binary, "binary"), self._start(load_bitdance, "bitdance")
        bitdance_recipe.train_bitdance(self.job, self.path("bitdance"), binary, start)


# Checkpoint to its training, in the order of their dependencies. The file is NAME.safetensors. A new autoencoder has no
# part that enlarges, so that this is trained after it.
PROGRAMS: dict[str, Callable[[Trainings], None]] = {
    "kl": Trainings.kl,
    "mar": Trainings.mar,
    "mar-draft": Trainings.draft,
    **{name: partial(Trainings.judge, name=name) for name in judge.JUDGES},
    "vq": Trainings.vq,
    **{name: partial(Trainings.gpt, name=name) for name in token_recipes.RECIPES},
    latent_recipe.NAME: Trainings.latent_samplers,
    "ta-tok": Trainings.ta_tok,
    "tar": Trainings.tar,
    **{name: partial(Trainings.detokenizer, name=name) for name in tar_recipes.DETOKENIZERS},
    "hybrid": Trainings.hybrid,
    "binary": Trainings.binary,
    "bitdance": Trainings.bitdance,
    **{f"{name}{ENLARGING}": partial(Trainings.enlarging, name=name) for name in AUTOENCODERS},
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--only", default=",".join(PROGRAMS), help="what to train, separated by commas; default all")
    folders = "folder of the checkpoints; default: the repository's, demo/checkpoints and lab/checkpoints (the judges)"
    parser.add_argument("--out", metavar="DIR", help=folders)
    parser.add_argument("--work", default="train-demo", metavar="DIR", help="resumable state")
    parser.add_argument("--improve", action="store_true", help=IMPROVE)
    parser.add_argument("--steps", metavar="N", help="optimiser steps of each training; default: the recipe's")
    parser.add_argument("--pictures", metavar="N", help="training images; default: the recipe's")
    parser.add_argument("--fp32", action="store_true", help="train in fp32, for a CPU without instructions for bf16")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")


def run(options: argparse.Namespace) -> int:
    """Train the named networks in the order of :data:`PROGRAMS`."""
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown or not names:
        raise UserError(
            f"only: {', '.join(unknown) or 'nothing'} cannot be trained; choose one of {', '.join(PROGRAMS)}."
        )
    steps = whole(options.steps, "steps", 1, 10**7) if options.steps else None
    images = whole(options.pictures, "pictures", 64, 10**7) if options.pictures else None
    out = None if options.out is None else typed_path(options.out, "out")
    work = typed_path(options.work, "work")
    job = Job(work, choose_device(options.device), log, steps, images, options.fp32)
    trainings = Trainings(job, out, options.improve)

    # Hours pass before the first of them is written.
    writable(work, "work")
    for name in names:
        writable(trainings.path(name).parent, "out", trainings.path(name).name)

    for name, program in PROGRAMS.items():
        if name in names:
            program(trainings)
            print(f"{name}: {trainings.path(name)}")

    return 0
