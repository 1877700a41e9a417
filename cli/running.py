"""What compare and bench share: finding models, reading settings, driving a sampler."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders import hub
from ..model_loaders.autoencoders import load_kl
from ..model_loaders.checkpoint import read_metadata
from ..model_loaders.mar import load_mar
from ..model_loaders.networks.kl import KLModel
from ..model_loaders.networks.mar import MARModel
from ..reports.record import Clock, Report
from ..samplers import presets
from ..samplers.conditioning import Condition
from ..samplers.masked import Sampled
from ..samplers.noise import PairedNoise
from ..samplers.registry import Entry, find
from ..samplers.settings import MARSettings, knobs, make
from .progress import Bar

SEEDS = 1 << 64
MOST_IMAGES = 1024
PRESET = "preset"
# Pictures decoded at once.
_CHUNK = 8


# ------------------------------------------------------------------------------------------------ options


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model and where."""
    parser.add_argument(
        "--model", default="demo", help="demo (default), an entry of the catalogue (mar-base, ...) or a file"
    )
    parser.add_argument("--decoder", default="auto", help="KL autoencoder: auto, an entry of the catalogue or a file")
    parser.add_argument(
        "--draft", default="auto", help="draft model of cspd: auto (the demo's for the demo), an entry of the catalogue or a file"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="weights; default auto"
    )
    parser.add_argument(
        "--models", type=Path, default=None, metavar="DIR",
        help="folder of weight files, where downloads go too; default ComfyUI's models/fastar, or ~/.cache/fastar",
    )  # fmt: skip


def sampler_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what is run."""
    parser.add_argument(
        "--samplers", default="mar,fasthybrid", help="names separated by commas, combinations with a plus, "
        "variants of one sampler after a colon (mar,mar:disa); default mar,fasthybrid",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="[SAMPLER.]NAME=VALUE", dest="sets",
        help="a setting of one sampler (fasthybrid.threshold=0.9) or of all that have it (cfg=2); may be repeated",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="AR steps of all samplers; the same as --set ar_steps=N")


def whole(text: str, name: str, low: int, high: int) -> int:
    """A whole number in a range.

    Raises:
        UserError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"{name}: {text!r} is not a whole number.") from None
    if not low <= number <= high:
        raise UserError(f"{name}: {number} is outside {low} to {high}.")
    return number


def output(path: Path | None, name: str, endings: Sequence[str]) -> Path | None:
    """A file that can be written later, checked before the work begins.

    Raises:
        UserError: an ending that means no known format, or a folder.
    """
    if path is None:
        return None
    if path.suffix.lower() not in endings:
        raise UserError(f"{name}: {path} should end in {' or '.join(endings)}.")
    if path.is_dir():
        raise UserError(f"{name}: {path} is a folder; name a file in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ------------------------------------------------------------------------------------------------ models


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        have += ["mps"] if torch.backends.mps.is_available() else []
        raise UserError(f"device: {name} cannot be used here; there is {', '.join(have)}.") from None
    return device


def models_folder(wanted: Path | None) -> Path:
    """Where weight files live: the option, ComfyUI's models/fastar, or the user's cache. Nothing is made."""
    if wanted is not None:
        return wanted
    package = Path(__file__).resolve().parents[1]
    if package.parent.name == "custom_nodes":
        return package.parent.parent / "models" / "fastar"
    if comfy := os.environ.get("COMFYUI_PATH"):
        return Path(comfy) / "models" / "fastar"
    return Path.home() / ".cache" / "fastar"


def find_file(choice: str, family: str, folder: Path) -> Path:
    """A file as it is, or what the catalogue knows under that name, downloaded if it has to be."""
    path = Path(choice).expanduser()
    # The catalogue comes first: a checkout has a folder called demo.
    catalogued = choice in {entry.id for entry in hub.entries(family)}
    if not catalogued and (path.is_file() or path.is_dir() or path.is_absolute()):
        return path  # the loader has sentences for what is no weight file
    with Bar(f"downloading {choice}") as bar:
        return hub.resolve(choice, family, [folder], folder, lambda done, total: bar(done / 1e6, total / 1e6, "MB"))


def load(options: argparse.Namespace) -> tuple[MARModel, KLModel, dict[str, str]]:
    """Model and decoder of the options, and the model file's metadata.

    Raises:
        UserError: a file that cannot be found or used, or a decoder of other latents.
    """
    device, folder = choose_device(options.device), models_folder(options.models)
    path = find_file(options.model, "mar", folder)
    model = load_mar(path, options.dtype, device)
    choice = hub.decoder_for(options.model, path) if options.decoder == "auto" else options.decoder
    decoder = load_kl(find_file(choice, "kl", folder), "auto", device)
    made, read = model.net.config.channels // model.patch**2, decoder.net.config.z_channels
    if made != read:
        raise UserError(
            f"decoder: {decoder.name} decodes {read} latent channels, {model.name} makes {made}; "
            "choose the decoder it was trained with."
        )
    return model, decoder, read_metadata(path)


def with_draft(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """The same, with the draft model in the hands of the samplers that need one; loaded only if one does.

    Raises:
        UserError: one is needed and none is named.
    """
    if not any(p.entry.needs_draft for p in planned):
        return list(planned)
    if options.draft == "auto" and options.model != "demo":
        names = ", ".join(p.entry.name for p in planned if p.entry.needs_draft)
        raise UserError(f"draft: {names} needs a small draft model beside {options.model}; name one with --draft.")
    choice = "demo-draft" if options.draft == "auto" else options.draft
    path = find_file(choice, "mar", models_folder(options.models))
    draft = load_mar(path, options.dtype, choose_device(options.device))
    return [
        replace(p, entry=replace(p.entry, run=partial(p.entry.run, draft=draft))) if p.entry.needs_draft else p for p in planned
    ]


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Planned:
    """A sampler with its settings, the settings that were asked for by name, and what tells it from its like."""

    entry: Entry
    settings: MARSettings
    asked: dict[str, str]
    variant: str = ""

    @property
    def label(self) -> str:
        """What stands above its picture."""
        if self.variant:
            return f"{self.entry.title}, {self.variant}"
        asked = (f"{name.replace('_', ' ')} {value}" for name, value in self.asked.items())
        return " ".join([self.entry.title, *asked])


def defaults(model: MARModel, metadata: dict[str, str]) -> dict[str, Any]:
    """Settings that suit a model better than the general ones: its metadata's ``defaults`` (a JSON object), and no more
    AR steps than it has tokens. The demo's are 32 AR steps where its file does not say."""
    try:
        own = json.loads(metadata.get("defaults", "{}"))
    except ValueError:
        own = {}
    out = {str(k): v for k, v in own.items()} if isinstance(own, dict) else {}
    usual = 32 if model.label_set == "picture-book" else MARSettings().ar_steps
    out.setdefault("ar_steps", min(usual, model.net.config.tokens))
    return out


def plan(
    samplers: str, sets: Sequence[str], steps: int | None, suited: dict[str, Any], demo: bool = True
) -> list[Planned]:  # fmt: skip
    """Samplers and settings of the options; the baseline comes first. A setting ``preset`` stands for several.

    Args:
        samplers: names separated by commas; one sampler several times as mar:one, mar:other.
        sets: "sampler.name=value" or "name=value", as given; later ones win.
        steps: AR steps, or None.
        suited: see :func:`defaults`; names that a sampler does not have are passed over.
        demo: whether presets are to suit the demo, or full-size models.

    Raises:
        UserError: an unknown sampler or setting, a value out of range.
    """
    entries: dict[str, Entry] = {}
    for name in filter(None, (part.strip().lower() for part in samplers.split(","))):
        kind, _, variant = name.partition(":")
        entry = find(kind)
        entries[f"{entry.name}:{variant}" if variant else entry.name] = entry
    if not entries:
        raise UserError("samplers: none is named; give at least one, for example mar.")
    shared: dict[str, str] = {} if steps is None else {"ar_steps": str(steps)}
    own: dict[str, dict[str, str]] = {key: {} for key in entries}
    for text in sets:
        left, equals, value = (part.strip() for part in text.partition("="))
        sampler, dot, name = left.rpartition(".")
        if not equals or not name or not value:
            raise UserError(f"set: {text!r} is not of the form name=value or sampler.name=value.")
        if dot and sampler not in own:
            kind, colon, variant = sampler.lower().partition(":")
            sampler = f"{find(kind).name}{colon}{variant}"  # the parts of a combination may stand in any order
            if sampler not in own:
                raise UserError(f"set: {sampler} is not among the samplers of this run, {', '.join(own)}.")
        have = dict.fromkeys(k for key, e in entries.items() if not dot or key == sampler for k in knobs(e.settings))
        if name not in have and name != PRESET:
            whose = f"{sampler} has no" if dot else "no sampler of this run has a"
            raise UserError(f"set: {whose} setting {name}; there are {', '.join([*have, PRESET])}.")
        (own[sampler] if dot else shared)[name] = value
    out = []
    for key, entry in entries.items():
        base = {k: v for k, v in {**suited, **shared}.items() if k in knobs(entry.settings)}
        asked = {**{k: v for k, v in shared.items() if k == PRESET}, **own[key]}
        preset = presets.values(entry.settings, asked.pop(PRESET, presets.AS_SET), demo)
        settings = make(entry.settings, {**base, **preset, **asked})
        out.append(Planned(entry, settings, own[key], key.partition(":")[2]))
    return sorted(out, key=lambda p: not p.entry.baseline or bool(p.variant))


# ------------------------------------------------------------------------------------------------ running


def draw(planned: Planned, model: MARModel, condition: Condition, seed: int, first: int = 0) -> Sampled:
    """Run a sampler to its end, with a progress bar.

    Args:
        first: index of the first image; image i of a batch uses (seed, first + i).
    """
    images = range(first, first + len(condition))
    sampler = planned.entry.run(model, condition, planned.settings, PairedNoise(seed, images), seed)
    with Bar(planned.entry.title) as bar:
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value
            bar(step.done, step.total, "AR steps")


def warm_up(planned: Planned, model: MARModel, condition: Condition) -> None:
    """One AR step with two diffusion steps, untimed: the first call of a process pays for libraries being set up."""
    settings = make(planned.entry.settings, {"ar_steps": 1, "diffusion_steps": 2})
    draw(Planned(planned.entry, settings, {}), model, condition, 0)


@torch.no_grad()
def decode(decoder: KLModel, latents: Tensor, report: Report | None = None) -> Tensor:
    """Pictures uint8 [B, H, W, 3] on the CPU; time and passes go into the report."""
    clock, scratch = Clock(latents.device), Report("", "", {}, None, len(latents), latents.device.type)
    dtype = next(decoder.net.parameters()).dtype
    with clock.phase("decoder"):
        parts = [decoder.net.decode(part.to(dtype)) for part in latents.split(_CHUNK)]
    clock.stop(scratch)
    if report is not None:
        report.phases["decoder"] = scratch.phases["decoder"]
        report.add(decoder_passes=len(parts))
    x = torch.cat(parts).float().permute(0, 2, 3, 1).nan_to_num(0.0)
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
