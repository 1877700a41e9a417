"""What compare and bench share: finding models, reading settings, driving a sampler."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders import checkpoint as ck
from ..model_loaders import hub
from ..model_loaders.autoencoders import expect_codes, load_kl, load_vq
from ..model_loaders.llamagen import load_llamagen
from ..model_loaders.mar import load_mar
from ..model_loaders.networks.gpt import TokenModel
from ..model_loaders.networks.kl import KLModel
from ..model_loaders.networks.mar import MARModel
from ..model_loaders.networks.vq import VQModel
from ..model_loaders.tar import load_detokenizer, parts_inside
from ..model_loaders.upsampler import load_upsampler
from ..reports.record import Clock, Report
from ..samplers import presets
from ..samplers.conditioning import AnyCondition
from ..samplers.mar.loop import Sampled
from ..samplers.mar.settings import MARSettings
from ..samplers.noise import PairedNoise
from ..samplers.registry import LLAMAGEN, MAR, TAR, Entry, find
from ..samplers.settings import knobs, make
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.loop import TokenSampled
from ..samplers.tokens.settings import LATENT, MuLoSDSettings, TokenSettings
from ..samplers.tokens.upsampling import UpSampling, up_sampling
from .progress import Bar

SEEDS = 1 << 64
MOST_IMAGES = 1024
PRESET = "preset"
DEMO = "demo"
AUTO = "auto"
# What runs where --samplers is not given, by what the model is; and what a draft model adds to it.
USUAL = {"mar": "mar,fasthybrid", "llamagen": "llamagen,zipar", "par": "par", "tar": "tar,zipar"}
_DRAFTED = ",mulosd"
# Family of models to the family of their files.
FILES = {MAR: "mar", LLAMAGEN: "llamagen", TAR: "dtok"}
# What suits models that draw from text, where the file does not say (LlamaGen's own defaults for them), and Tar's.
_TEXT_DEFAULTS, _TAR_DEFAULTS = {"cfg": 7.5, "top_k": 1000}, {"top_k": 0}
# Pictures decoded at once.
_CHUNK = 8


# ------------------------------------------------------------------------------------------------ options


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model and where."""
    parser.add_argument(
        "--model",
        default=DEMO,
        help="demo (default), an entry of the catalogue (mar-base, llamagen-b-256, ar-dtok-512, ...) or a file",
    )
    parser.add_argument(
        "--decoder", default="auto", help="KL or VQ autoencoder: auto, an entry of the catalogue or a file"
    )
    parser.add_argument(
        "--grid", metavar="N", help="tokens along one side, for a file that does not say (16, 24, 32, 64)"
    )
    parser.add_argument(
        "--draft",
        default="auto",
        help="draft model of cspd (a smaller one) or mulosd (one that draws a smaller picture): auto (where the "
        "catalogue has one), an entry of the catalogue or a file; lantern takes one of the model's own size, else the model itself",
    )
    parser.add_argument(
        "--up-sampler",
        default="auto",
        help="learned up-sampler of mulosd.up_sampler=latent: auto (the demo's) or a file",
    )
    parser.add_argument(
        "--tar",
        default="auto",
        help="language model of Tar: auto (the demo's, or tar-1.5b), an entry, a folder or a file",
    )
    parser.add_argument(
        "--ta-tok", default="auto", help="TA-Tok of Tar: auto (the de-tokenizer's), an entry of the catalogue or a file"
    )
    parser.add_argument(
        "--encoder", default="flan-t5-xl", help="text encoder of text-to-image models; default flan-t5-xl"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="weights; default auto"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of weight files, where downloads go too; default ComfyUI's models/fastar, or ~/.cache/fastar",
    )


def sampler_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what is run."""
    parser.add_argument(
        "--samplers",
        help="names separated by commas, combinations with a plus, variants of one sampler after a colon "
        "(mar,mar:disa); default mar,fasthybrid, for a LlamaGen llamagen,zipar, for a PAR par, for Tar tar,zipar and mulosd with a draft",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[SAMPLER.]NAME=VALUE",
        dest="sets",
        help="a setting of one sampler (fasthybrid.threshold=0.9), of all that have it (cfg=2), or of what writes Tar's codes "
        "(prompt.detail=169); may be repeated",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="AR steps of all MAR samplers; the same as --set ar_steps=N"
    )


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


@dataclass(frozen=True, eq=False)
class Ready:
    """A model to sample from.

    Attributes:
        model: the model.
        decoder: its decoder; None where nothing is decoded.
        metadata: of its file.
        choice, decoder_choice: what it and its decoder were chosen by: an entry of the catalogue or a file; "" if there is none.
        path: its file.
    """

    model: MARModel | TokenModel
    decoder: KLModel | VQModel | None
    metadata: Mapping[str, str]
    choice: str = ""
    decoder_choice: str = ""
    path: Path | None = None

    @property
    def family(self) -> str:
        """One of the registry's families."""
        if not isinstance(self.model, TokenModel):
            return MAR
        return TAR if self.model.net.config.condition in ("features", "codes") else LLAMAGEN

    @property
    def demo(self) -> bool:
        """Whether presets are to suit the demo."""
        return self.model.label_set == "picture-book"

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return _tokens(self.model)

    @property
    def classes(self) -> int:
        """Labels that it knows, if it draws classes; of a text model, or Tar's, the width of a row."""
        return (
            self.model.net.config.condition_size
            if isinstance(self.model, TokenModel)
            else self.model.net.config.classes
        )

    @property
    def draws_from_text(self) -> bool:
        """Whether it reads prompts, not labels."""
        return isinstance(self.model, TokenModel) and self.model.net.config.condition != "class"

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.net.parameters()).device


def usual_samplers(options: argparse.Namespace) -> str:
    """What --samplers says, or what suits the model that is named."""
    if options.samplers is not None:
        return options.samplers
    if options.model == DEMO:
        return USUAL[TAR] + _DRAFTED if _prompted(options) else USUAL[MAR]
    kind = _kind(options) or MAR
    return USUAL[kind] + (_DRAFTED if kind == TAR and options.draft != AUTO else "")


def _prompted(options: argparse.Namespace) -> bool:
    """Whether something is to be drawn from words."""
    return bool(getattr(options, "text", None))


def _listed(model: str) -> str | None:
    """Family of a catalogue entry; None for a file.

    Raises:
        UserError: it is Tar's language model, which alone draws nothing.
    """
    if model in {entry.id for entry in hub.entries("tar")}:
        raise UserError(
            f"model: {model} writes the codes that a de-tokenizer draws from; name it with --tar, and a de-tokenizer with --model, for "
            "example ar-dtok-512."
        )
    return next(
        (family for family, files in FILES.items() if model in {entry.id for entry in hub.entries(files)}), None
    )


def _kind(options: argparse.Namespace) -> str:
    """What the file of --model holds: "mar", "llamagen", "par", "tar" or "", which some loader has a sentence for.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    state = ck.read(find_file(options.model, FILES[_listed(options.model) or MAR], models_folder(options.models))).state
    family = next((family for family, files in FILES.items() if files == _words(state)), "")
    if family == LLAMAGEN and any(name.startswith("spe_tok_embeddings.") for name in state):
        return "par"
    return family


def _words(state: Mapping[str, Tensor]) -> str:
    """Family of the file of a model; a file that holds a de-tokenizer with all its parts is that."""
    own = {name: tensor for name, tensor in state.items() if not name.startswith(("ta_tok.", "vq."))}
    return ck.identify(own or state)


def load(options: argparse.Namespace, entries: Iterable[Entry]) -> dict[str, Ready]:
    """What each sampler samples from, by its name: the model of the options, or of the demo the one of its family.

    Raises:
        UserError: a file that cannot be found or used, a sampler of another family, a decoder of other latents.
    """
    entries = list(dict.fromkeys(entries))
    families = _families(entries, _prompted(options))
    if options.model == DEMO and options.decoder != AUTO and len(set(families.values())) > 1:
        raise UserError("decoder: the samplers of this run are of two families with a decoder each; leave it at auto.")
    made: dict[str, Ready] = {}
    out = {}
    for entry in entries:
        choice, family = options.model, families[entry.name]
        if choice == DEMO:
            choice = _of_demo(entry, entries, families, models_folder(options.models))
        elif not made:
            found = _listed(choice) or _kind(options) or entry.family
            found = LLAMAGEN if found == "par" else found
            other = next((e for e in entries if found not in e.families), None)
            if other:
                raise UserError(
                    f"samplers: {other.name} samples {other.models}, but {Path(choice).name} is not one; leave it out, "
                    "or name another model."
                )
            family = found
        made[choice] = made.get(choice) or _load(choice, family, options)
        out[entry.name] = made[choice]
    return out


def _families(entries: Sequence[Entry], prompted: bool) -> dict[str, str]:
    """Sampler's name to the family of the demo that it means. One of several goes with those that have no choice; or with Tar, if
    there is a prompt."""
    settled = {e.family for e in entries if not e.also}
    tar = prompted or TAR in settled and LLAMAGEN not in settled
    return {e.name: TAR if tar and TAR in e.families else e.family for e in entries}


def _of_demo(entry: Entry, entries: Sequence[Entry], families: Mapping[str, str], folder: Path) -> str:
    """The built-in model that a sampler means by "demo".

    A sampler that has only one settles the picture's size for the others of its family: seconds compare only then.
    """
    family = families[entry.name]
    fixed = [e.demos(family)[0] for e in entries if families[e.name] == family and len(e.demos(family)) == 1]
    own = entry.demos(family)
    if len(own) == 1 or not fixed:
        return own[0]
    sizes = {choice: read_grid(find_file(choice, FILES[family], folder)) for choice in (fixed[0], *own)}
    return next((choice for choice in own if sizes[choice] == sizes[fixed[0]]), own[0])


def read_grid(path: Path) -> str | None:
    """Tokens along one side, as the file's metadata says."""
    return ck.read_metadata(path).get("grid")


def _load(choice: str, family: str, options: argparse.Namespace) -> Ready:
    device, folder = choose_device(options.device), models_folder(options.models)
    path = find_file(choice, FILES[family], folder)
    if family == MAR:
        model = load_mar(path, options.dtype, device)
        wanted = hub.decoder_for(choice, path) if options.decoder == AUTO else options.decoder
        decoder = load_kl(find_file(wanted, "kl", folder), "auto", device)
        makes, reads = model.net.config.channels // model.patch**2, decoder.net.config.z_channels
        if makes != reads:
            raise UserError(
                f"decoder: {decoder.name} decodes {reads} latent channels, {model.name} makes {makes}; "
                "choose the decoder it was trained with."
            )
        return Ready(model, decoder, ck.read_metadata(path), choice, wanted, path)
    grid = None if options.grid is None else whole(options.grid, "grid", 2, 128)
    tokens = (load_detokenizer if family == TAR else load_llamagen)(path, options.dtype, device, grid)
    wanted, inside = options.decoder, None
    if wanted == AUTO and family == TAR and "vq" in parts_inside(path):
        inside = path
    elif wanted == AUTO:
        wanted = hub.decoder_for(choice, path, FILES[family], tokens.net.config.condition == "text")
    vq = load_vq(inside or find_file(wanted, "vq", folder), "auto", device)
    expect_codes(vq, tokens)
    return Ready(tokens, vq, ck.read_metadata(path), choice, wanted, path)


def with_draft(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """The same, with what the samplers need beside their model in their hands: a draft model, and what codes mean. Loaded only if
    one needs it.

    Raises:
        UserError: one is needed and none is named, or there is nothing to decode with.
    """
    made: dict[tuple[str, str], MARModel | TokenModel] = {}
    alone = not any(p.entry.needs_codes == "up_sampler" for p in planned)
    out = []
    for p in planned:
        more: dict[str, Any] = {}
        if p.entry.needs_codes and not isinstance(p.on.decoder, VQModel):
            raise UserError(
                f"random: {p.entry.name} needs a tokenizer, and random weights come without; name a --model instead."
            )
        if p.entry.needs_draft:
            more["draft"] = _draft(p, options, made, alone)
        if p.entry.needs_codes == "up_sampler":
            more["up_sampler"] = _up_sampling(p, options)
        elif p.entry.needs_codes:
            more["vq"] = p.on.decoder
        out.append(replace(p, entry=replace(p.entry, run=partial(p.entry.run, **more))) if more else p)
    return out


def _draft(
    p: Planned, options: argparse.Namespace, made: dict[tuple[str, str], MARModel | TokenModel], alone: bool
) -> MARModel | TokenModel:
    """The draft model of a sampler.

    Args:
        made: what was loaded before; added to.
        alone: whether --draft can mean no other sampler's draft than one of the target's own size.
    """
    family, itself = p.on.family, p.entry.needs_codes == "vq"
    if itself and options.draft == AUTO:
        return p.on.model
    choice = hub.draft_for(p.on.choice) if options.draft == AUTO else options.draft
    if choice is None:
        what = "a small draft model" if family == MAR else "a draft model that draws a smaller picture"
        raise UserError(f"draft: {p.entry.name} needs {what} beside {options.model}; name one with --draft.")
    if (family, choice) not in made:
        loaders: dict[str, Callable[..., MARModel | TokenModel]] = {
            MAR: load_mar,
            LLAMAGEN: load_llamagen,
            TAR: load_detokenizer,
        }
        try:
            path = find_file(choice, FILES[family], models_folder(options.models))
            made[family, choice] = loaders[family](path, options.dtype, choose_device(options.device))
        except UserError as e:  # the loaders know of one field
            raise UserError(str(e).replace("checkpoint:", "draft:", 1)) from e
    draft = made[family, choice]
    return p.on.model if itself and not alone and _tokens(draft) != p.on.tokens else draft


def _tokens(model: MARModel | TokenModel) -> int:
    return model.tokens if isinstance(model, TokenModel) else model.net.config.tokens


def _up_sampling(p: Planned, options: argparse.Namespace) -> UpSampling:
    """How MuLo-SD's draft becomes as large as the target's picture.

    Raises:
        UserError: a learned up-sampler is asked for and there is none.
    """
    assert isinstance(p.settings, MuLoSDSettings) and isinstance(p.on.decoder, VQModel)
    learned = None
    if p.settings.up_sampler == LATENT:
        choice = hub.up_sampler_for(p.on.decoder_choice) if options.up_sampler == AUTO else options.up_sampler
        if choice is not None:
            path = find_file(choice, "upsampler", models_folder(options.models))
            learned = load_upsampler(path, AUTO, choose_device(options.device))
    return up_sampling(p.settings.up_sampler, p.on.decoder, model=learned)


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Planned:
    """A sampler with its settings, the settings that were asked for by name, what tells it from its like, and its model."""

    entry: Entry
    settings: MARSettings | TokenSettings
    asked: dict[str, str]
    variant: str = ""
    ready: Ready | None = None

    @property
    def label(self) -> str:
        """What stands above its picture."""
        if self.variant:
            return f"{self.entry.title}, {self.variant}"
        asked = (f"{name.replace('_', ' ')} {value}" for name, value in self.asked.items())
        return " ".join([self.entry.title, *asked])

    @property
    def on(self) -> Ready:
        """Its model."""
        assert self.ready is not None, "planned without a model"
        return self.ready


def defaults(model: MARModel | TokenModel, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Settings that suit a model better than the general ones: its metadata's ``defaults`` (a JSON object); for a MAR no
    more AR steps than it has tokens, 32 for the demo's where its file does not say; for text LlamaGen's own, for Tar its own."""
    out = stated_defaults(metadata)
    if isinstance(model, TokenModel):
        usual = {"class": {}, "text": _TEXT_DEFAULTS}.get(model.net.config.condition, _TAR_DEFAULTS)
        return {**usual, **out}
    steps = 32 if model.label_set == "picture-book" else MARSettings().ar_steps
    out.setdefault("ar_steps", min(steps, model.net.config.tokens))
    return out


def stated_defaults(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The metadata's own; {} if it says none that can be read."""
    try:
        own = json.loads(metadata.get("defaults", "{}"))
    except ValueError:
        own = {}
    return {str(k): v for k, v in own.items()} if isinstance(own, dict) else {}


def plan(samplers: str, sets: Sequence[str], steps: int | None, ready: Mapping[str, Ready]) -> list[Planned]:
    """Samplers and settings of the options, family by family, in each the baseline first. A setting ``preset`` stands
    for several.

    Args:
        samplers: names separated by commas; one sampler several times as mar:one, mar:other.
        sets: "sampler.name=value" or "name=value", as given; later ones win.
        steps: AR steps, or None.
        ready: models by sampler's name; without one the settings are only checked.

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
    if steps is not None and not any("ar_steps" in knobs(e.settings) for e in entries.values()):
        raise UserError("steps: no sampler of this run has AR steps; their passes follow from the picture's size.")
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
        on = ready.get(entry.name)
        suited = defaults(on.model, on.metadata) if on else {}
        base = {k: v for k, v in {**suited, **shared}.items() if k in knobs(entry.settings)}
        asked = {**{k: v for k, v in shared.items() if k == PRESET}, **own[key]}
        preset = presets.values(entry.settings, asked.pop(PRESET, presets.AS_SET), on is None or on.demo)
        settings = make(entry.settings, {**base, **preset, **asked})
        out.append(Planned(entry, settings, own[key], key.partition(":")[2], on))
    of = [p.ready.family if p.ready else p.entry.family for p in out]
    families = list(dict.fromkeys(of))
    order = sorted(
        range(len(out)), key=lambda i: (families.index(of[i]), not out[i].entry.baseline or bool(out[i].variant))
    )
    return [out[i] for i in order]


def measured_against(planned: Sequence[Planned]) -> list[int]:
    """For each sampler the one that its speed-up is measured against: the first on a model of that family whose pictures have as
    many tokens. Models of two families share neither network nor size, so their seconds say nothing about a method."""
    first: dict[tuple[str, int], int] = {}
    return [first.setdefault((p.on.family, p.on.tokens), i) for i, p in enumerate(planned)]


# ------------------------------------------------------------------------------------------------ running


def draw(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Sampled | TokenSampled:
    """Run a sampler to its end, with a progress bar.

    Args:
        first: index of the first image; image i of a batch uses (seed, first + i).
    """
    unit = "AR steps" if planned.entry.family == MAR else "passes"
    return drive(_begin(planned, condition, seed, first), planned.entry.title, unit)


def drive(sampler: Any, title: str, unit: str) -> Any:
    """What a sampler returns, with a progress bar."""
    with Bar(title) as bar:
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value
            bar(step.done, step.total, unit)


def _begin(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Any:
    images = range(first, first + len(condition))
    noise = PairedNoise(seed, images) if planned.entry.family == MAR else PairedDraws(seed, images)
    return planned.entry.run(planned.on.model, condition, planned.settings, noise, seed)


def warm_up(planned: Planned, condition: AnyCondition) -> None:
    """One AR step with two diffusion steps, or three passes over tokens, untimed: the first call of a process pays for
    libraries being set up."""
    if planned.entry.family == MAR:
        settings = make(planned.entry.settings, {"ar_steps": 1, "diffusion_steps": 2})
        draw(replace(planned, settings=settings), condition, 0)
    else:
        sampler = _begin(planned, condition, 0)
        for _ in islice(sampler, 3):
            pass
        sampler.close()


@torch.no_grad()
def decode(decoder: KLModel | VQModel, made: Sampled | TokenSampled) -> Tensor:
    """Pictures uint8 [B, H, W, 3] on the CPU; time and passes go into the report."""
    net, report = decoder.net, made.report
    latents = made.latents if isinstance(made, Sampled) else decoder.net.vectors(made.codes)  # type: ignore[operator]
    clock, scratch = Clock(latents.device), Report("", "", {}, None, len(latents), latents.device.type)
    dtype = next(net.parameters()).dtype
    with clock.phase("decoder"):
        parts = [net.decode(part.to(dtype)) for part in latents.split(_CHUNK)]
    clock.stop(scratch)
    report.phases["decoder"] = scratch.phases["decoder"]
    report.add(decoder_passes=len(parts))
    x = torch.cat(parts).float().permute(0, 2, 3, 1).nan_to_num(0.0)
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
