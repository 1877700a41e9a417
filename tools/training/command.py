"""Train the built-in demo checkpoints again: the autoencoder, the MAR, the draft MAR and the judge; the VQ tokenizer, the
LlamaGens of two sizes, the PAR and the latent up-sampler; TA-Tok, the Tar and its de-tokenizers of two sizes.

A training that was stopped goes on where it was (its state is in --work). On two CPU cores the whole takes several
hours, and the last stage of the large LlamaGen nine more; a GPU only makes it quicker.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...cli.running import choose_device, whole
from ...errors import UserError

# What can be trained, in the order of dependence, and the file it ends in.
FILES = {
    "kl": "kl.safetensors",
    "mar": "mar.safetensors",
    "mar-draft": "mar-draft.safetensors",
    "judge": "judge.safetensors",
    "vq": "vq.safetensors",
    "llamagen-low": "llamagen-low.safetensors",
    "llamagen": "llamagen.safetensors",
    "par": "par.safetensors",
    "upsampler": "upsampler.safetensors",
    "ta-tok": "ta-tok.safetensors",
    "tar": "tar.safetensors",
    "dtok-low": "dtok-low.safetensors",
    "dtok": "dtok.safetensors",
}

IMPROVE = (
    "begin with what is there: MARs, LlamaGens, PAR, Tar; of the autoencoder, train only the decoder on, "
    "of the large LlamaGen, only its last stage"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--only", default=",".join(FILES), help="what to train, separated by commas; default all")
    parser.add_argument(
        "--out", type=Path, default=None, metavar="DIR", help="where checkpoints go; default: into the package"
    )
    parser.add_argument("--work", type=Path, default=Path("train-demo"), metavar="DIR", help="resumable state")
    parser.add_argument("--improve", action="store_true", help=IMPROVE)
    parser.add_argument("--steps", metavar="N", help="optimiser steps of each, instead of the recipe's; for a try")
    parser.add_argument("--pictures", metavar="N", help="pictures to train on, instead of the recipe's; for a try")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")


def run(options: argparse.Namespace) -> int:
    """Train what was named, one after the other."""
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in FILES]
    if unknown or not names:
        raise UserError(f"only: {', '.join(unknown) or 'nothing'} cannot be trained; there are {', '.join(FILES)}.")
    steps = whole(options.steps, "steps", 1, 10**7) if options.steps else None
    few: dict[str, Any] = {"count": whole(options.pictures, "pictures", 64, 10**7)} if options.pictures else {}
    device = choose_device(options.device)

    from ...model_loaders.autoencoders import load_kl, load_vq
    from ...model_loaders.llamagen import load_llamagen
    from ...model_loaders.mar import load_mar
    from ...model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
    from . import judge, recipes, reinforce, ta_tok_recipe, tar_recipes, token_recipes, upsampler_recipe

    out = options.out or Path(__file__).resolve().parents[2] / "demo" / "checkpoints"
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is no folder.")

    def short(schedule: Any) -> Any:
        return schedule if steps is None else replace(schedule, steps=steps, warmup=min(schedule.warmup, steps))

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def needed(name: str, what: str) -> Path:
        path = out / FILES[name]
        if not path.is_file():
            raise UserError(f"only: {', '.join(names)} needs the {what} {path}; train {name} first.")
        return path

    def autoencoder() -> Any:
        return load_kl(needed("kl", "autoencoder"), "fp32", device).net

    def tokenizer() -> Any:
        return load_vq(needed("vq", "tokenizer"), "fp32", device).net

    def semantic_tokenizer() -> Any:
        return load_ta_tok(needed("ta-tok", "semantic tokenizer"), "fp32", device).net

    def mar(config: Any, name: str, schedule: Any) -> None:
        path = out / FILES[name]
        start = load_mar(path, "fp32", device).net if options.improve else None
        recipes.train_mar(
            config, name, autoencoder(), options.work, path, device, short(schedule), log=log, start=start, **few
        )

    def kl() -> None:
        stages = short(recipes.KL_SCHEDULE), short(recipes.KL_FINE_SCHEDULE), short(recipes.KL_ROBUST_SCHEDULE)
        start = autoencoder() if options.improve else None
        recipes.train_kl(options.work, out / FILES["kl"], device, *stages, log=log, start=start, **few)

    def gpt(recipe: Any) -> None:
        path, vq = out / FILES[recipe.name], tokenizer()
        net = load_llamagen(path, "fp32", device).net if options.improve else None
        if net is None or not recipe.reinforced:
            schedule = short(recipe.schedule)
            net = token_recipes.train_gpt(recipe, vq, options.work, path, device, schedule, log=log, start=net, **few)
        if recipe.reinforced:
            stages = short(reinforce.CRITIC_SCHEDULE), short(reinforce.SCHEDULE)
            critic = reinforce.train_critic(net, recipe.grid, vq, options.work, device, stages[0], log=log, **few)
            reinforce.reinforce(recipe, net, vq, critic, options.work, path, device, stages[1], log=log, **few)

    def tar() -> None:
        path, ta_tok = out / FILES["tar"], semantic_tokenizer()
        start = load_tar(path, "fp32", device).net if options.improve else None
        tar_recipes.train_language(
            ta_tok, options.work, path, device, short(tar_recipes.LANGUAGE_SCHEDULE), log=log, start=start, **few
        )

    def detokenizer(recipe: Any) -> None:
        path, ta_tok, vq = out / FILES[recipe.name], semantic_tokenizer(), tokenizer()
        start = load_detokenizer(path, "fp32", device).net if options.improve else None
        tar_recipes.train_detokenizer(
            recipe, ta_tok, vq, options.work, path, device, short(recipe.schedule), log=log, start=start, **few
        )

    programs: dict[str, Callable[[], Any]] = {
        "kl": kl,
        "mar": lambda: mar(recipes.TARGET, "mar", recipes.TARGET_SCHEDULE),
        "mar-draft": lambda: mar(recipes.DRAFT, "mar-draft", recipes.DRAFT_SCHEDULE),
        "judge": lambda: judge.train_judge(
            autoencoder(), options.work, out / FILES["judge"], device, short(judge.SCHEDULE), log=log, **few
        ),
        "vq": lambda: token_recipes.train_vq(
            options.work, out / FILES["vq"], device, short(token_recipes.VQ_SCHEDULE), log=log, kl=autoencoder(), **few
        ),
        **{name: partial(gpt, recipe) for name, recipe in token_recipes.RECIPES.items()},
        "upsampler": lambda: upsampler_recipe.train_upsampler(
            tokenizer(),
            options.work,
            out / FILES["upsampler"],
            device,
            short(upsampler_recipe.SCHEDULE),
            log=log,
            **few,
        ),
        "ta-tok": lambda: ta_tok_recipe.train_ta_tok(
            options.work, out / FILES["ta-tok"], device, short(ta_tok_recipe.SCHEDULE), log=log, **few
        ),
        "tar": tar,
        **{name: partial(detokenizer, recipe) for name, recipe in tar_recipes.DETOKENIZERS.items()},
    }
    for name in FILES:
        if name in names:
            programs[name]()
            print(f"{name}: {out / FILES[name]}")
    return 0
