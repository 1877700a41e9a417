"""The trainings of ``train-demo``: what each checkpoint is trained from, and with which recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...model_loaders.autoencoders import load_kl, load_vq
from ...model_loaders.hybrid import load_hybrid
from ...model_loaders.llamagen import load_llamagen
from ...model_loaders.mar import load_mar
from ...model_loaders.networks.autoencoder import KLAutoencoder, VQAutoencoder
from ...model_loaders.networks.mar import MARConfig
from ...model_loaders.networks.ta_tok import TATok
from ...model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
from .. import files
from . import hybrid_recipe, judge, recipes, reinforce, ta_tok_recipe, tar_recipes, token_recipes, upsampler_recipe
from .training import Schedule


def log(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Trainings:
    """One training per checkpoint.

    Attributes:
        names: the checkpoints to train, for error messages.
        out: folder of the checkpoints; None selects the repository's own.
        work: folder of the resumable states.
        device: training device.
        improve: start from the existing checkpoints.
        steps: optimiser steps instead of the recipes', or None.
        count: ``{"count": n}`` for n training images instead of the recipes', or empty.
    """

    names: list[str]
    out: Path | None
    work: Path
    device: torch.device
    improve: bool
    steps: int | None
    count: dict[str, Any]

    def train(self, name: str) -> None:
        """Train a checkpoint and write its file.

        Raises:
            UserError: a checkpoint that it is trained on is missing.
        """
        programs: dict[str, Callable[[], Any]] = {
            "kl": self._kl,
            "mar": lambda: self._mar("mar", recipes.TARGET, recipes.TARGET_SCHEDULE),
            "mar-draft": lambda: self._mar("mar-draft", recipes.DRAFT, recipes.DRAFT_SCHEDULE),
            "judge": self._judge,
            "vq": self._vq,
            "upsampler": self._upsampler,
            "ta-tok": self._ta_tok,
            "tar": self._tar,
            "hybrid": self._hybrid,
        }
        if name in token_recipes.RECIPES:
            self._gpt(token_recipes.RECIPES[name])
        elif name in tar_recipes.DETOKENIZERS:
            self._detokenizer(tar_recipes.DETOKENIZERS[name])
        else:
            programs[name]()

    def path(self, name: str) -> Path:
        """The file of a checkpoint."""
        return files.checkpoint(name, self.out)

    # -------------------------------------------------------------------------------------------- shared parts

    def _schedule(self, schedule: Schedule) -> Schedule:
        if self.steps is None:
            return schedule
        return replace(schedule, steps=self.steps, warmup=min(schedule.warmup, self.steps))

    def _required(self, name: str, what: str) -> Path:
        path = self.path(name)
        if not path.is_file():
            raise UserError(f"only: {', '.join(self.names)} needs the {what} {path}; train {name} first.")
        return path

    def _autoencoder(self) -> KLAutoencoder:
        return load_kl(self._required("kl", "autoencoder"), "fp32", self.device).net

    def _tokenizer(self) -> VQAutoencoder:
        return load_vq(self._required("vq", "tokenizer"), "fp32", self.device).net

    def _semantic_tokenizer(self) -> TATok:
        return load_ta_tok(self._required("ta-tok", "semantic tokenizer"), "fp32", self.device).net

    # -------------------------------------------------------------------------------------------- one per family

    def _kl(self) -> None:
        first, fine = self._schedule(recipes.KL_SCHEDULE), self._schedule(recipes.KL_FINE_SCHEDULE)
        robust = self._schedule(recipes.KL_ROBUST_SCHEDULE)
        start = self._autoencoder() if self.improve else None
        recipes.train_kl(
            self.work, self.path("kl"), self.device, first, fine, robust, log=log, start=start, **self.count
        )

    def _mar(self, name: str, config: MARConfig, schedule: Schedule) -> None:
        path, kl = self.path(name), self._autoencoder()
        start = load_mar(path, "fp32", self.device).net if self.improve else None
        recipes.train_mar(
            config, name, kl, self.work, path, self.device, self._schedule(schedule), log=log, start=start, **self.count
        )

    def _judge(self) -> None:
        kl, schedule = self._autoencoder(), self._schedule(judge.SCHEDULE)
        judge.train_judge(kl, self.work, self.path("judge"), self.device, schedule, log=log, **self.count)

    def _vq(self) -> None:
        kl, schedule = self._autoencoder(), self._schedule(token_recipes.VQ_SCHEDULE)
        token_recipes.train_vq(self.work, self.path("vq"), self.device, schedule, log=log, kl=kl, **self.count)

    def _gpt(self, recipe: token_recipes.TokenRecipe) -> None:
        path, vq = self.path(recipe.name), self._tokenizer()
        net = load_llamagen(path, "fp32", self.device).net if self.improve else None
        if net is None or not recipe.reinforced:
            schedule = self._schedule(recipe.schedule)
            net = token_recipes.train_gpt(
                recipe, vq, self.work, path, self.device, schedule, log=log, start=net, **self.count
            )
        if recipe.reinforced:
            schedule = self._schedule(reinforce.CRITIC_SCHEDULE)
            critic = reinforce.train_critic(
                net, recipe.grid, vq, self.work, self.device, schedule, log=log, **self.count
            )
            schedule = self._schedule(reinforce.SCHEDULE)
            reinforce.reinforce(recipe, net, vq, critic, self.work, path, self.device, schedule, log=log, **self.count)

    def _upsampler(self) -> None:
        vq, schedule = self._tokenizer(), self._schedule(upsampler_recipe.SCHEDULE)
        path = self.path("upsampler")
        upsampler_recipe.train_upsampler(vq, self.work, path, self.device, schedule, log=log, **self.count)

    def _ta_tok(self) -> None:
        schedule = self._schedule(ta_tok_recipe.SCHEDULE)
        ta_tok_recipe.train_ta_tok(self.work, self.path("ta-tok"), self.device, schedule, log=log, **self.count)

    def _tar(self) -> None:
        path, ta_tok = self.path("tar"), self._semantic_tokenizer()
        schedule = self._schedule(tar_recipes.LANGUAGE_SCHEDULE)
        start = load_tar(path, "fp32", self.device).net if self.improve else None
        tar_recipes.train_language(ta_tok, self.work, path, self.device, schedule, log=log, start=start, **self.count)

    def _detokenizer(self, recipe: tar_recipes.DetokenizerRecipe) -> None:
        path, ta_tok, vq = self.path(recipe.name), self._semantic_tokenizer(), self._tokenizer()
        schedule = self._schedule(recipe.schedule)
        start = load_detokenizer(path, "fp32", self.device).net if self.improve else None
        tar_recipes.train_detokenizer(
            recipe, ta_tok, vq, self.work, path, self.device, schedule, log=log, start=start, **self.count
        )

    def _hybrid(self) -> None:
        path, kl, schedule = self.path("hybrid"), self._autoencoder(), self._schedule(hybrid_recipe.SCHEDULE)
        first = None if self.improve else self._schedule(hybrid_recipe.START_SCHEDULE)
        if self.improve:
            start = load_hybrid(path, "fp32", self.device).hybrid
        else:
            mar = load_mar(self._required("mar", "MAR"), "fp32", self.device).net
            start = hybrid_recipe.joined(mar, load_tar(self._required("tar", "language model"), "fp32", self.device))
        hybrid_recipe.train_hybrid(
            kl, self.work, path, self.device, first, schedule, log=log, start=start, **self.count
        )
