"""Train the built-in demo checkpoints: the autoencoder, the MAR, its draft model and the judge; the VQ tokenizer, two
LlamaGens, the PAR and the latent up-sampler; TA-Tok, the Tar language model and two de-tokenizers; the hybrid, a MAR of prompts.

An interrupted training resumes from its state in --work. All trainings take several hours on two CPU cores; the last
stage of the large LlamaGen takes nine more. A GPU is faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...cli.options import choose_device, whole
from ...errors import UserError

# Names of the checkpoints, in the order of their dependencies. The file is NAME.safetensors.
NAMES = (
    "kl",
    "mar",
    "mar-draft",
    "judge",
    "vq",
    "llamagen-low",
    "llamagen",
    "par",
    "upsampler",
    "ta-tok",
    "tar",
    "dtok-low",
    "dtok",
    "hybrid",
)

IMPROVE = (
    "start from the existing checkpoints: MARs, LlamaGens, PAR, Tar, hybrid; of the autoencoder, train only the decoder, "
    "of the large LlamaGen, only the last stage"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--only", default=",".join(NAMES), help="what to train, separated by commas; default all")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the checkpoints; default: the repository's, demo/checkpoints and, for the judge, tools/checkpoints",
    )
    parser.add_argument("--work", type=Path, default=Path("train-demo"), metavar="DIR", help="resumable state")
    parser.add_argument("--improve", action="store_true", help=IMPROVE)
    parser.add_argument("--steps", metavar="N", help="optimiser steps of each training; default: the recipe's")
    parser.add_argument("--pictures", metavar="N", help="training images; default: the recipe's")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")


def run(options: argparse.Namespace) -> int:
    """Train the named networks in the order of :data:`NAMES`."""
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise UserError(f"only: {', '.join(unknown) or 'nothing'} cannot be trained; there are {', '.join(NAMES)}.")
    steps = whole(options.steps, "steps", 1, 10**7) if options.steps else None
    count: dict[str, Any] = {"count": whole(options.pictures, "pictures", 64, 10**7)} if options.pictures else {}
    device = choose_device(options.device)
    if options.out and options.out.exists() and not options.out.is_dir():
        raise UserError(f"out: {options.out} is no folder.")

    from .trainings import Trainings

    trainings = Trainings(names, options.out, options.work, device, options.improve, steps, count)
    for name in NAMES:
        if name in names:
            trainings.train(name)
            print(f"{name}: {trainings.path(name)}")
    return 0
