"""Options that several commands have, and the checks of their values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model_loaders.files.wrappers import WEIGHTS
from ..model_loaders.kinds import ALL_DTYPES
from ..networks.speed import SPEEDS
from ..runs import limits
from ..runs.loading import AUTO, DEMO, ENCODER, Source, choose_device, find_file, models_folder

# Options for models, devices and folders that take text: name to default and help.
MODEL_OPTIONS = {
    "model": (DEMO, "demo (default), an entry of the catalogue (mar-base, llamagen-b-256, ar-dtok-512, ...) or a file"),
    "decoder": (AUTO, "KL or VQ autoencoder: auto, an entry of the catalogue or a file"),
    "grid": (None, "tokens along one side (16, 24, 32, 64); default: as the file states"),
    "draft": (
        AUTO,
        "draft model of cspd (a smaller one) or mulosd (one of a smaller image): auto (where the catalogue has one), "
        "an entry of the catalogue or a file",
    ),
    "upscale-model": (
        AUTO,
        "what enlarges the draft of mulosd: auto (built-in latent samplers where they fit, else bicubic), bicubic, a "
        "file of latent samplers, or a file of a super-resolution model, for which the package spandrel is needed",
    ),
    "tar": (AUTO, "language model of Tar: auto (the demo's, or tar-1.5b), an entry, a folder or a file"),
    "ta-tok": (AUTO, "TA-Tok of Tar: auto (the de-tokenizer's), an entry of the catalogue or a file"),
    "encoder": (ENCODER, f"text encoder of text-to-image models; default {ENCODER}"),
    "device": (AUTO, "auto (default), cpu, cuda, cuda:1 or mps"),
}


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, devices and folders."""
    for name, (default, about) in MODEL_OPTIONS.items():
        parser.add_argument(f"--{name}", default=default, help=about)

    add = parser.add_argument
    add(
        "--dtype",
        default=AUTO,
        choices=(AUTO, *ALL_DTYPES),
        help="precision of the weights; default auto; int8 and fp8 store the transformer blocks in 8 bits, int4 and "
        "int4-g64 in fewer, which changes the image",
    )
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="which weights to read from a training checkpoint that also holds averaged (EMA) weights: "
        "auto (default, the averaged ones), ema or trained",
    )
    add(
        "--speed",
        default=AUTO,
        choices=SPEEDS,
        help="auto (default): on an NVIDIA card, repeated work as CUDA graphs, with the same image; plain: launched "
        "step by step; compile: blocks and diffusion steps with torch.compile, which takes about a minute at first",
    )

    models_option(parser)


def models_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of weights."""
    parser.add_argument(
        "--models",
        metavar="DIR",
        help="folder of weight files and downloads; default ComfyUI's models/fastar, or ~/.cache/fastar",
    )


def condition_options(parser: argparse.ArgumentParser, seed: str) -> None:
    """Add the options for what the images show, and for the seed."""
    add = parser.add_argument

    add("--label", help="class names or ids, separated by commas; default class 0")
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        dest="text",
        help="a prompt, for Harmon, UniPic, Janus, BitDance, NextStep, Tar and LlamaGen's text-to-image models; may be "
        "repeated",
    )
    add(
        "--negative",
        metavar="TEXT",
        help="what guidance moves away from: for Harmon and UniPic a whole instruction, by default 'Generate an "
        "image.'; for NextStep a text, by default none",
    )
    add(
        "--image",
        action="append",
        metavar="FILE",
        help="for Janus-4o and NextStep-1-Large-Edit: an image of any size that the prompt changes; may be repeated, "
        "one for each prompt",
    )
    add(
        "--freedom",
        metavar="NUMBER",
        help="with --image, for Janus-4o: how much more the guidance counts what the image shows than its very pixels, "
        "0 to 10; at 0 they count most; default 5. For NextStep-1-Large-Edit use --set cfg_img=NUMBER",
    )

    add("--seed", default="7", help=f"{seed}; default 7")
    add("--batch", default="1", metavar="N", help="images of each label or text; default 1")


def sampler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for samplers and settings."""
    add = parser.add_argument

    add(
        "--samplers",
        help="names separated by commas, combinations with a plus; after a colon the label of a variant (mar,mar:disa) "
        "or settings as in Any Sampler (zipar:window=4,parallel=16); default mar,fasthybrid, for a LlamaGen "
        "llamagen,zipar, for a PAR par, "
        "for Tar tar,zipar and mulosd with a draft",
    )
    setting_option(parser)


def setting_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for settings."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[SAMPLER.]NAME=VALUE",
        dest="sets",
        help="a setting of one sampler (fasthybrid.threshold=0.9), of all that have it (cfg=2), or of Tar's language "
        "model (prompt.detail=169); may be repeated",
    )


def whole(text: str, name: str, low: int, high: int) -> int:
    """Parse an integer from ``low`` to ``high``; a UserError names the option."""
    try:
        number: Any = int(text)
    except ValueError:
        number = text
    return limits.whole(number, name, low, high)


def source(options: argparse.Namespace) -> Source:
    """How this run finds files and where it places weights."""
    folder = models_folder(options.models)

    def find(choice: str, family: str) -> Path:
        return find_file(choice, family, folder)  # huggingface-hub shows a bar on a terminal

    return Source(find, choose_device(options.device), options.dtype, speed=options.speed)
