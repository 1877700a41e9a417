"""Train latent samplers, with which MuLo-SD enlarges a draft and reduces the result again, for a VQ tokenizer.

The images should be like those that the models draw, at the target's size or larger; the paper takes LAION's. An
interrupted training resumes from its state in --work. The file belongs to the tokenizer and to the ratio of the sides
of target and draft, and serves every pair of grids of that ratio. With a GPU, and sizes above the demo's: --width 256.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...cli.options import choose_device, whole
from ...errors import UserError, first_line
from ...model_loaders.autoencoders.loader import load_vq
from ...reports.files import typed_path, writable
from ...runs.loading import find_file, models_folder
from .enlarging_recipe import without_part
from .latent_recipe import HELD_OUT, LOSSES, PATCHGAN, Recipe, train_latent_samplers
from .training import Job

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class FolderImages:
    """Images of a folder and its subfolders, cut to their middle square."""

    paths: tuple[Path, ...]
    side: int

    @staticmethod
    def of(folder: Path, side: int) -> FolderImages:
        """All images of a folder.

        Raises:
            UserError: it does not exist, or has too few images.
        """
        if not folder.is_dir():
            raise UserError(f"images: there is no folder {str(folder)[:200]}; give a folder of images.")

        paths = tuple(sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS))
        if len(paths) <= HELD_OUT:
            raise UserError(
                f"images: {folder.name} has only {len(paths)} images (files that end in {' or '.join(_ENDINGS)}), but "
                f"{HELD_OUT} images are set aside for measuring the result; give a folder with more images, thousands "
                "for a real model."
            )
        return FolderImages(paths, side)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Tensor) -> Tensor:
        """The images of int64 [n], uint8 [n, 3, side, side].

        Raises:
            UserError: an image cannot be read.
        """
        return torch.stack([self._one(self.paths[row]) for row in rows.tolist()])

    def _one(self, path: Path) -> Tensor:
        try:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (self.side, self.side), Image.Resampling.LANCZOS)
        except (OSError, ValueError, Image.DecompressionBombError) as problem:
            raise UserError(f"images: {path.name} cannot be read ({first_line(problem)}); remove this file.") from None
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--vq", required=True, help="the tokenizer: an entry of the catalogue (vq16-t2i) or a file")
    parser.add_argument("--images", required=True, metavar="DIR", help="folder of training images, with subfolders")
    parser.add_argument("--side", required=True, metavar="N", help="pixels per side of the target's images, e.g. 512")
    parser.add_argument(
        "--ratio", default="2", metavar="R", help="side of the target over that of the draft; default 2"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, .safetensors")
    parser.add_argument("--work", default="train-latent-samplers", metavar="DIR", help="resumable state")
    parser.add_argument("--models", metavar="DIR", help="folder of weight files; default as for generate")
    last = "losses of the second stage, each with those before it but token: "
    parser.add_argument("--losses", default=PATCHGAN, choices=LOSSES, help=last + ", ".join(LOSSES))
    parser.add_argument("--width", default=str(Recipe.width), metavar="N", help="channels; default the demo's")
    parser.add_argument("--batch", metavar="N", help="images per step; default the demo's")
    parser.add_argument("--steps", metavar="N", help="optimiser steps of each stage; default the demo's")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")


def run(options: argparse.Namespace) -> int:
    """Check the options, and train."""
    # 1. Check.
    device = choose_device(options.device)
    side = whole(options.side, "side", 8, 4096)
    ratio = whole(options.ratio, "ratio", 2, 8)
    recipe = _recipe(options)
    out = typed_path(options.out, "out")
    work = typed_path(options.work, "work")
    if out.suffix != ".safetensors":
        raise UserError(f"out: {out.name} must end in .safetensors.")
    images = FolderImages.of(typed_path(options.images, "images"), side)
    writable(out.parent, "out", out.name)
    writable(work, "work")

    # 2. The tokenizer.
    path = find_file(options.vq, "vq", models_folder(options.models))
    vq = without_part(load_vq(path, "fp32", device).net)
    if side % (ratio * vq.config.stride):
        raise UserError(
            f"side: {side} is not a multiple of {ratio * vq.config.stride}; choose a multiple, because one token of "
            f"the draft is {ratio * vq.config.stride} pixels wide."
        )

    # 3. Train.
    steps = None if options.steps is None else whole(options.steps, "steps", 1, 10**7)
    job = Job(work, device, lambda line: print(line, file=sys.stderr, flush=True), steps)
    train_latent_samplers(job, out, vq, images, ratio, recipe, options.losses, out.stem)
    print(out)
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    """The demo's recipe with the width and the batch that are asked for."""
    recipe = Recipe(width=whole(options.width, "width", 4, 4096))
    if options.batch is None:
        return recipe

    batch = whole(options.batch, "batch", 1, 4096)
    return replace(recipe, first=replace(recipe.first, batch=batch), second=replace(recipe.second, batch=batch))
