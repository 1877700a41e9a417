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
    "model": (
        DEMO,
        "the model: demo (default), an entry of the catalogue (mar-base, llamagen-b-256, ar-dtok-512, ...), or a file",
    ),
    "decoder": (AUTO, "KL or VQ autoencoder: auto, an entry of the catalogue, or a file"),
    "grid": (
        None,
        "number of tokens along one side of the image (16, 24, 32, 64); default: the number that the file states",
    ),
    "draft": (
        AUTO,
        "draft model for cspd (a smaller model) or mulosd (a model for smaller images): auto (the catalogue's draft "
        "model, if there is one), an entry of the catalogue, or a file",
    ),
    "upscale-model": (
        AUTO,
        "what enlarges the draft of mulosd: auto (the built-in latent samplers if they fit, otherwise bicubic), "
        "bicubic, a file of latent samplers, or a file of a super-resolution model (this needs the package spandrel)",
    ),
    "tar": (
        AUTO,
        "language model of Tar: auto (the demo's for demo models, otherwise tar-1.5b), an entry of the "
        "catalogue, a folder, or a file",
    ),
    "ta-tok": (
        AUTO,
        "TA-Tok of Tar: auto (the TA-Tok that belongs to the de-tokenizer), an entry of the catalogue, or a file",
    ),
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
        "int4-g64 in fewer bits; each of these four changes the image",
    )
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="which weights to read from a training checkpoint that also holds averaged (EMA) weights: auto (default: "
        "the averaged weights), ema or trained",
    )
    add(
        "--speed",
        default=AUTO,
        choices=SPEEDS,
        help="auto (default) uses CUDA graphs on an NVIDIA GPU, with the identical image; plain launches every "
        "operation separately; compile also uses torch.compile, which takes about a minute before the first image",
    )

    models_option(parser)


def models_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of weights."""
    parser.add_argument(
        "--models",
        metavar="DIR",
        help="folder for weight files and downloads; default: ComfyUI's models/fastar, or ~/.cache/fastar without "
        "ComfyUI",
    )


def condition_options(parser: argparse.ArgumentParser, seed: str) -> None:
    """Add the options for what the images show, and for the seed."""
    add = parser.add_argument

    add("--label", help="class names or ids, separated by commas; default: class 0")
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
        help="the text from which guidance moves the image away: for Harmon and UniPic a whole instruction (default: "
        "'Generate an image.'), for NextStep any text (default: none)",
    )
    add(
        "--image",
        action="append",
        metavar="FILE",
        help="for Janus-4o and NextStep-1-Large-Edit: the image, of any size, that the prompt changes; may be "
        "repeated, with one image for each prompt",
    )
    add(
        "--freedom",
        metavar="NUMBER",
        help="for Janus-4o with --image: how freely the model may change the image, from 0 (closest to the pixels) to "
        "10 (only the content is kept); default 5. For NextStep-1-Large-Edit, use --set cfg_img=NUMBER",
    )

    add("--seed", default="7", help=f"{seed}; default 7")
    add("--batch", default="1", metavar="N", help="number of images per label or prompt; default 1")


def sampler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for samplers and settings."""
    add = parser.add_argument

    add(
        "--samplers",
        help="names of samplers, separated by commas; a plus combines two samplers. A colon may follow a name, and "
        "then a label for this variant (mar,mar:disa) or settings as in Any Sampler (zipar:window=4,parallel=16). "
        "Default: mar,fasthybrid; llamagen,zipar for a LlamaGen; par for a PAR model; tar,zipar for Tar, and also "
        "mulosd with a draft model",
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
        help="a setting of one sampler (fasthybrid.threshold=0.9), of all samplers that have this setting (cfg=2), or "
        "of Tar's language model (prompt.detail=169); may be repeated",
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
