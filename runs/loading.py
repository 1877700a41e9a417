"""From choices to models: checkpoint, decoder, TA-Tok, draft model and up-sampler.

A choice is the id of a catalogue entry or the name of a file. The nodes, the command line and the pipeline load models
through this module, so they accept the same files and report the same errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders import kinds
from ..model_loaders.autoencoders.latent_samplers import expect_fitting, fits, load_latent_samplers
from ..model_loaders.autoencoders.loader import expect_same_codes, load_vq
from ..model_loaders.catalogue import hub
from ..model_loaders.files import checkpoint as ck
from ..model_loaders.files.shards import weight_files
from ..model_loaders.janus.loader import load_janus_head, load_janus_vision
from ..model_loaders.tar.loader import expect_features, load_ta_tok, load_tar
from ..model_loaders.upscalers import load_upscaler
from ..networks.autoencoder import KLModel, VQModel
from ..networks.bitdance import BlockModel
from ..networks.janus import JanusModel, WordHead
from ..networks.janus_vision import ImageReader
from ..networks.latent_samplers import LatentSamplersModel
from ..networks.llama import TokenModel
from ..networks.mar import MARModel
from ..networks.quantized import QUANTISED
from ..networks.speed import choose
from ..networks.ta_tok import TATokModel
from ..networks.tar import TarModel
from ..reports.files import typed_path
from ..reports.record import fingerprint
from ..samplers.conditioning import (
    CodeCondition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
)
from ..samplers.settings import knobs, settings_from
from ..samplers.tokens.mulosd import grid_ratio
from ..samplers.tokens.mulosd.drafting import BICUBIC, LatentUpSampling, PixelUpSampling, UpSampling
from ..samplers.tokens.tar import TarPromptSettings
from .choice import ModelFacts
from .families import Family
from .labels import DEMO_LABELS
from .registry import FAMILIES, Entry, family_of_files

AUTO = "auto"
# The text encoder of text-to-image models (a catalogue entry).
ENCODER = "flan-t5-xl"
DEMO = "demo"
# The family of what nobody recognises, whose loader says what else a file holds.
USUAL = next(iter(FAMILIES))

# Kinds of files that are no model of a family.
LANGUAGE = "tar"  # language models of Tar
READER = "ta-tok"  # what reads and writes their codes
LATENT_SAMPLERS = "latent-samplers"  # what enlarges MuLo-SD's drafts in latents
# Language models of Tar: the demo's, and the one for all other de-tokenizers.
DEMO_TAR = "demo-tar"
OFFICIAL_TAR = "tar-1.5b"

Model = MARModel | TokenModel | BlockModel


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as widgets and options show it ("fp32", "bf16", "fp16")."""
    return next(name for name, kind in kinds.DTYPES.items() if kind == dtype)


@dataclass(frozen=True)
class Source:
    """How files are found and where their weights are placed."""

    find: Callable[[str, str], Path]  # (choice, file family) to the path; downloads the file if necessary
    device: torch.device  # device of the weights
    dtype: str = AUTO  # "auto" or one of kinds.ALL_DTYPES
    compute: torch.device | None = None  # device for which "auto" selects the dtype; None for ``device``
    speed: str = AUTO  # how the networks run, see speed.SPEEDS
    # Further arguments of every loader: the operations of a host, of which the networks are built.
    about: Mapping[str, Any] = field(default_factory=dict)

    def precision(self, family: str) -> kinds.Precision:
        """What a family's networks compute in; a UserError if ``dtype`` is unknown or not for the device."""
        return self.precision_of_files(FAMILIES[family].files)

    def precision_of_files(self, kind: str) -> kinds.Precision:
        """The same of a kind of files."""
        device = self.compute or self.device
        dtype = kinds.choose_dtype(self.dtype, device, kind)

        return kinds.Precision(dtype, kinds.choose_bits(self.dtype, device))

    def precision_name(self, family: str) -> str:
        """The name of :meth:`precision`: one of kinds.ALL_DTYPES."""
        dtype = self.precision(family).compute

        return self.dtype if self.dtype in QUANTISED else dtype_name(dtype)


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" selects CUDA, then MPS, then the CPU. Raises UserError: it cannot be used."""
    if name == AUTO:
        name = _fastest_device()

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on meta, which computes nothing
    except (RuntimeError, AssertionError, NotImplementedError, ValueError):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if torch.backends.mps.is_available():
            have.append("mps")
        raise UserError(f"device: {name} is not available here; choose one of {', '.join(have)}.") from None

    return device


def _fastest_device() -> str:
    """The device that "auto" selects."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def models_folder(wanted: str | Path | None) -> Path | None:
    """Folder of weight files: ``wanted``, ComfyUI's models/fastar, or the user's cache. It is not created.

    None in a container without a home folder: the demo and files named by their path need no folder.
    """
    if wanted is not None:
        return typed_path(wanted, "models")

    package = Path(__file__).resolve().parents[1]
    if package.parent.name == "custom_nodes":
        return package.parent.parent / "models" / "fastar"

    comfy = os.environ.get("COMFYUI_PATH")  # noqa: TID251
    if comfy:
        return typed_path(comfy, "COMFYUI_PATH") / "models" / "fastar"

    try:
        return Path.home() / ".cache" / "fastar"
    except RuntimeError:
        return None


def resolve(
    choice: str,
    family: str,
    folders: str | Path | Sequence[str | Path] | None = None,
    download_to: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The path of a catalogue entry, which is downloaded if necessary, or of a file.

    Args:
        choice: a catalogue entry ("demo", "mar-base", ...) or a file.
        family: what the file holds: "mar", "hybrid", "llamagen", "janus", "bitdance", "dtok" (a Tar de-tokenizer),
            "tar" (its language model), "ta-tok", "kl", "vq" or "bitdance-ae" (decoders), "t5" or "tokenizer".
        folders: folder or folders of weight files; None for ComfyUI's models/fastar or ~/.cache/fastar.
        download_to: folder for downloads; None for the first of ``folders``.
        progress: called with the bytes received and their total (0 if unknown) during a download.

    Raises:
        UserError: an unknown family, no such file, or a failed download.
    """
    if family not in kinds.KINDS:
        raise UserError(f"family: {family!r} is unknown; choose one of {', '.join(kinds.KINDS)}.")

    if isinstance(folders, (str, Path)):
        folders = [folders]
    if not folders and download_to is None:
        return find_file(str(choice), family, models_folder(None), progress)

    searched = [typed_path(folder, "folders") for folder in folders or ()]
    target = searched[0] if download_to is None else typed_path(download_to, "download_to")

    return _named_file(str(choice), family) or hub.resolve(str(choice), family, searched, target, progress)


def find_file(
    choice: str, family: str, folder: Path | None, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The path of a catalogue entry, downloaded to ``folder`` if necessary, or of a file; see :func:`.hub.resolve`.

    Without a folder only built-in entries and files named by their path are found; a UserError for other names.
    """
    path = _named_file(choice, family)
    if path is not None:
        return path

    if folder is not None:
        return hub.resolve(choice, family, [folder], folder, progress)

    if hub.absent(choice, family, []) is not None:
        raise UserError(
            f"models: {choice[:80]} must be downloaded, but this user has no home folder to download it to; name a "
            "folder with --models (models= in Python)."
        )

    return hub.resolve(choice, family, [], Path())


def _named_file(choice: str, family: str) -> Path | None:
    """The file or folder of weights that a choice names by its path; None for an entry or a name in a model folder."""
    # Catalogue entries take precedence: a checkout contains a folder named demo.
    if choice in _ids(family):
        return None

    field = kinds.KINDS[family].field
    path = typed_path(choice, field)
    try:
        named = path.is_file() or path.is_dir() or path.is_absolute()
    except OSError as problem:
        raise UserError(
            f"{field}: {choice[:120]} cannot be read ({problem.strerror or problem}); check the path and its "
            "permissions."
        ) from None

    if not named:
        return None

    is_utf8 = str(path) == str(path).encode("utf-8", "replace").decode()
    if not is_utf8:
        raise UserError(
            f"{field}: the file name {ascii(str(path))[1:-1]} is not UTF-8, so the file cannot be opened; rename the "
            "file."
        )
    return path  # the loader reports what is not a weight file


def _ids(family: str) -> set[str]:
    """Catalogue entries of a file family."""
    return {entry.id for entry in hub.entries(family)}


@dataclass(frozen=True, eq=False)
class Ready:
    """A loaded model with its decoder."""

    family: str  # model family of the registry
    model: Model
    decoder: KLModel | VQModel | None = None  # None for random weights
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the model's file
    choice: str = ""  # what selected the model; "" if nothing did

    @property
    def config(self) -> Any:
        """Configuration of the network."""
        return self.model.net.config

    @property
    def demo(self) -> bool:
        """Whether presets use the demo's values."""
        return self.model.label_set == DEMO_LABELS

    @property
    def facts(self) -> ModelFacts:
        """What the settings of a run depend on."""
        return ModelFacts.of(self.model, defaults(self))

    @property
    def kind(self) -> Family:
        """Its family."""
        return FAMILIES[self.family]

    @property
    def condition(self) -> str:
        """Kind of condition, a key of :data:`.conditioning.KINDS`."""
        return self.model.condition

    @property
    def tokens(self) -> int:
        """Tokens per image."""
        height, width = self.kind.grid(self.model)
        return height * width

    @property
    def classes(self) -> int:
        """Number of classes; for text and Tar models the channels of a condition row."""
        return self.kind.classes(self.model)

    @property
    def vq(self) -> VQModel:
        """The decoder of a token model."""
        return cast(VQModel, self.decoder)

    @property
    def latent_channels(self) -> int:
        """Channels of the decoder's latents."""
        config: Any = self.vq.net.config
        return config.code_channels if self.kind.codes else config.z_channels

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.net.parameters()).device


def listed_family(choice: str) -> str | None:
    """Family of a catalogue entry, None for a file; a UserError for Tar's language model, which draws no images."""
    if choice in _ids(LANGUAGE):
        raise UserError(
            f"model: {choice} is Tar's language model, which cannot generate an image alone; use --tar to name it, and "
            "use --model to name the de-tokenizer that generates the image: for example, --tar "
            f'{choice} --model ar-dtok-512 (in Python: load("ar-dtok-512", tar="{choice}")).'
        )

    for name, family in FAMILIES.items():
        if choice in _ids(family.files):
            return name
    return None


def identify(path: Path) -> tuple[str, tuple[str, ...]]:
    """The family of the model in a file or folder, and the samplers for a command that names none; "" and () for
    anything else.
    """
    read = ck.read(path, shards=weight_files(path, "checkpoint", "a model"))
    file, kind = kinds.identified(read)

    family = family_of_files(kind)
    return (family.name, family.samplers_of_file(list(file.state))) if family else ("", ())


@enough_memory(
    "dtype: there is not enough memory to load this model; choose int8, bf16 or fp16, or unload other models."
)
def load(
    family: str, choice: str, source: Source, decoder: str = AUTO, grid: int | None = None, weights: str = AUTO
) -> Ready:
    """Load a model of a family of the registry, and its decoder.

    Args:
        family: a family of the registry.
        choice: a catalogue entry or file.
        source: how files are found and where their weights are placed.
        decoder: a catalogue entry or file; "auto" selects the decoder the model was trained with.
        grid: tokens per side of a token model; None takes the file's.
        weights: which weights of a training's file: "ema" (averaged), "trained" (not averaged), or "auto".

    Raises:
        UserError: a file is missing or does not fit, or the decoder is for other latents.
    """
    # 1. The model.
    about = FAMILIES[family]
    path = source.find(choice, about.files)
    model: Any = _load_model(family, path, source, grid, weights)
    metadata = ck.read_metadata(path)

    # 2. The decoder in the same file, or the one that is chosen or stated.
    inside = about.decoder_inside(path, source.device, **source.about) if decoder == AUTO else None
    if inside is not None:
        about.expect_decoder(inside, model)
        return Ready(family, model, inside, metadata, choice)

    stated = hub.stated_decoder(choice, about.files, metadata.get("decoder"))
    if decoder == AUTO:
        text = model.condition == "text"
        decoder = hub.decoder_for(choice, about.files, metadata.get("decoder"), text)

    file = source.find(decoder, about.decoder)
    made = about.load_decoder(file, AUTO, source.device, **source.about)
    about.expect_decoder(made, model)

    # 3. Say so if the model may have been trained with another one.
    if stated is None or stated not in (decoder, hub.entry_of(file, about.decoder)):
        model = about.with_note(model, _unknown_decoder(made, model, stated))
    return Ready(family, model, made, metadata, choice)


def outline(family: str, choice: str, path: Path, grid: int | None = None, weights: str = AUTO) -> Ready:
    """A model without weights and without decoder.

    For what depends on shapes and metadata only, such as :func:`defaults`.

    Only the header of the file is read. Arguments as :func:`load`; ``path``: the file of the choice.

    Raises:
        UserError: as :func:`load`; also for a model folder whose tokenizer is not beside it.
    """

    def find(name: str, kind: str) -> Path:
        raise UserError(
            f"checkpoint: there is no tokenizer in the folder of {path.name}; load the model, and FastAR downloads "
            "the tokenizer."
        )

    source = Source(find, torch.device("meta"), "fp32")
    model = _load_model(family, path, source, grid, weights)
    return Ready(family, model, None, ck.read_metadata(path), choice)


def _unknown_decoder(decoder: KLModel | VQModel, model: Model, stated: str | None) -> str:
    """The remark that a model may have been trained with another decoder; ``stated`` is the one that its file names."""
    if stated is None:
        known = "the model's file does not name its decoder"
    else:
        known = f"the model was trained with {stated}"

    scale = getattr(model, "latent_scale", None)
    unknown = "FastAR cannot tell whether this decoder reads the same codes"
    if scale is not None:
        unknown = (
            f"FastAR cannot tell whether this decoder fits the scale ({scale:g}) and the statistics of the model's "
            "latents"
        )

    return f"decoder {decoder.name}: {known}; {unknown}"


def _load_model(family: str, path: Path, source: Source, grid: int | None = None, weights: str = AUTO) -> Model:
    """Load a model without its decoder."""
    about = FAMILIES[family]
    precision = source.precision(family)
    model: Model = about.load(path, precision, source.device, source.find, grid, weights, **source.about)
    choose(model.net, source.speed, source.compute or source.device)
    return model


def load_language_model(choice: str, source: Source) -> tuple[TarModel, dict[str, Any]]:
    """Load the language model of Tar; returns it and the settings that its file states."""
    dtype = source.precision_of_files(LANGUAGE)
    path = source.find(choice, LANGUAGE)

    model = load_tar(path, dtype, source.device, **source.about)
    return model, stated_defaults(ck.read_metadata(path))


def outline_language_model(path: Path) -> tuple[TarModel, dict[str, Any]]:
    """As :func:`load_language_model`, without weights; only the header of the file is read."""
    return load_tar(path, "fp32", "meta"), stated_defaults(ck.read_metadata(path))


def load_reader(ready: Ready, source: Source, choice: str = AUTO) -> TATokModel:
    """Load the TA-Tok that turns semantic codes into a de-tokenizer's features."""
    if choice == AUTO:
        choice = hub.ta_tok_for(ready.metadata.get("ta_tok"))

    path = source.find(choice, READER)
    reader = load_ta_tok(path, source.precision(ready.family), source.device, encoder=False, **source.about)
    expect_features(reader, cast(TokenModel, ready.model))
    return reader


def load_image_reader(model: JanusModel, vq: VQModel, source: Source) -> ImageReader:
    """Load what reads images for a Janus, from the model's own file; ``vq`` is its tokenizer."""
    assert model.vision_file is not None, "expect_editor() has checked it"
    own = source.precision(model.family)
    dtype = AUTO if own.compute is torch.float16 else own  # in fp16 no SigLIP was tried
    return load_janus_vision(model.vision_file, vq, dtype, source.device, **source.about)


def load_word_head(model: JanusModel, source: Source) -> WordHead:
    """Load the output layer for words of a Janus, from the model's own file."""
    assert model.vision_file is not None, "expect_reader() has checked it"
    return load_janus_head(model.vision_file, source.precision(model.family), source.device, **source.about)


def read_images(condition: ImagePromptCondition, reader: Any, family: Family) -> ImagePromptCondition:
    """The condition with what a reader of a family reads of its images, of each distinct one once.

    Raises:
        UserError: see :meth:`.ImageReader.read`.
    """
    found: dict[str, Any] = {}
    read = []
    for image in condition.images:
        key = fingerprint(image)
        if key not in found:
            found[key] = reader.read(family.prepared(image, reader))
        read.append(found[key])

    return replace(condition, encoded_images=tuple(read))


def identified(choice: str, files: Source) -> tuple[str, tuple[str, ...]]:
    """What the file of a model holds, see :func:`identify`."""
    family = listed_family(choice) or USUAL

    return identify(files.find(choice, FAMILIES[family].files))


def family_of_choice(choice: str, files: Source) -> str:
    """The family of a catalogue entry or file; the family of an unrecognised file is :data:`USUAL`."""
    found = listed_family(choice)
    if found is None:
        found, _ = identified(choice, files)
    return found or USUAL


class Drafts:
    """Draft models of the samplers of a run, each loaded once.

    ``choice``: "auto" (the catalogue's), a catalogue entry or a file; ``target_name``: what the user called the target;
    ``upscale_model``: what enlarges drafts of a smaller image: "auto" (built-in latent samplers where they fit, else
    bicubic interpolation), "bicubic", or the file of latent samplers or of a super-resolution model.
    """

    def __init__(self, source: Source, choice: str, target_name: str, upscale_model: str = AUTO):
        self._source = source
        self._choice = choice
        self._name = target_name
        self._upscale_model = upscale_model
        self._up_sampling: UpSampling | None = None
        self._loaded: dict[tuple[str, str], Model] = {}

    def up_sampling(self, target: Ready, draft: Any) -> UpSampling:
        """What enlarges the codes of a draft.

        Raises:
            UserError: the file does not fit; see :func:`load_upscaler`.
        """
        if self._up_sampling is None or self._up_sampling.tokenizer is not target.vq:
            self._up_sampling = self._make_up_sampling(target.vq, grid_ratio(cast(TokenModel, target.model), draft))
        return self._up_sampling

    def _make_up_sampling(self, vq: VQModel, ratio: int) -> UpSampling:
        if self._upscale_model == BICUBIC:
            return PixelUpSampling(vq)

        if self._upscale_model == AUTO:
            found = built_in_latent_samplers(vq, ratio, self._source.device, **self._source.about)
            return PixelUpSampling(vq) if found is None else LatentUpSampling(vq, found)

        path = typed_path(self._upscale_model, "upscale_model")
        if not holds_latent_samplers(path):
            return PixelUpSampling(vq, *load_upscaler(path, self._source.device))

        samplers = load_latent_samplers(path, self._source.device, **self._source.about)
        expect_fitting(samplers, vq, ratio)
        return LatentUpSampling(vq, samplers)

    def use(self, source: Source) -> None:
        """Load draft models from another source, on another device for example; loaded ones are freed."""
        self._source = source
        self._loaded.clear()
        self._up_sampling = None

    def load(self, sampler: str, target: Ready) -> Model:
        """The draft model of a sampler.

        Raises:
            UserError: none is named and the catalogue has none, or the file does not fit.
        """
        choice = hub.draft_for(target.choice) if self._choice == AUTO else self._choice
        if choice is None:
            raise UserError(
                f"draft: {sampler} needs a small draft model in addition to {self._name}; name one with --draft "
                "(draft= in Python)."
            )

        key = (target.family, choice)
        if key in self._loaded:
            return self._loaded[key]

        # A masked draft has the target's size, whatever it was trained for.
        grid = None if target.kind.codes else target.config.grid
        try:
            path = self._source.find(choice, FAMILIES[target.family].files)
            draft = _load_model(target.family, path, self._source, grid)
            if target.kind.codes:
                self._expect_same_codes(target, choice, path)
        except UserError as error:  # the loaders name the field of the main model
            _, _, problem = str(error).partition(": ")
            raise UserError(f"draft: {problem}") from error

        self._loaded[key] = draft
        return draft

    def _expect_same_codes(self, target: Ready, choice: str, path: Path) -> None:
        """Raise a UserError if a draft model was trained with another codebook than its target decodes."""
        if target.decoder is None:
            return

        files = FAMILIES[target.family].files
        text = target.condition == "text"
        own = hub.decoder_for(choice, files, ck.read_metadata(path).get("decoder"), text)
        targets = hub.decoder_for(target.choice, files, target.metadata.get("decoder"), text)
        if own == targets:
            return

        vq = load_vq(self._source.find(own, "vq"), AUTO, self._source.device)
        expect_same_codes(target.vq, vq, target.model.name)


def built_in_latent_samplers(
    vq: VQModel, ratio: int, device: str | torch.device, **about: Any
) -> LatentSamplersModel | None:
    """The built-in latent samplers for a tokenizer and the ratio of the sides of two grids; None if there are none.

    ``about``: as for :func:`load_latent_samplers`.
    """
    for entry in hub.entries(LATENT_SAMPLERS):
        if not entry.built_in or entry.missing:
            continue
        path = hub.resolve(entry.id, LATENT_SAMPLERS, (), Path())
        samplers = load_latent_samplers(path, device, **about)
        if fits(samplers, vq, ratio):
            return samplers
    return None


def holds_latent_samplers(path: Path) -> bool:
    """Whether a file holds latent samplers; False also for a file that does not exist or that other loaders read."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return kinds.identify(ck.read(path, "upscale_model").state) == LATENT_SAMPLERS


# What may be named beside a model: its usual value, and who uses it.
_NAMED_BESIDE: dict[str, tuple[Any, str]] = {
    "decoder": (AUTO, "because only models that generate images have a decoder"),
    "draft": (AUTO, "because only CSpD and MuLo-SD have a draft model"),
    "upscale_model": (AUTO, "because only MuLo-SD enlarges a draft"),
    "grid": (None, ""),  # each family says why
    "tar": (AUTO, "because only a de-tokenizer of Tar needs a language model"),
    "ta_tok": (AUTO, "because only a de-tokenizer of Tar needs a TA-Tok"),
    "encoder": (ENCODER, "because only the text-to-image models of LlamaGen need a text encoder"),
    "negative": (None, "because only Harmon, UniPic and NextStep read a negative text"),
}


def expect_used(
    given: Mapping[str, Any],
    samplers: Collection[Entry],
    reads: Collection[str],
    nobody: str,
    one_grid: Collection[str] = (),
) -> None:
    """Check that no choice is given beside a model that nothing would use: it would be ignored without a word.

    Args:
        given: the choices, by the arguments of :func:`fastar_nodes.load` or the options of the command line.
        samplers: those that may run.
        reads: kinds of conditions that the models read.
        nobody: who would use it, and does not, for messages.
        one_grid: of each model why it takes no grid, see :attr:`.Family.one_grid`; "" if it takes one.

    Raises:
        UserError: there is one.
    """
    from_codes = not {FeatureCondition.kind, CodeCondition.kind}.isdisjoint(reads)
    used = {
        "decoder": bool(reads),
        "draft": any(entry.needs_draft for entry in samplers),
        "upscale_model": any(entry.needs_up_sampler for entry in samplers),
        "grid": not all(one_grid),
        "tar": from_codes,
        "ta_tok": from_codes,
        "encoder": TextCondition.kind in reads,
        "negative": PromptCondition.kind in reads,
    }

    for name, value in given.items():
        argument = name.replace("-", "_")
        usual, whose = _NAMED_BESIDE[argument]
        if value != usual and not used[argument]:
            reason = whose or " and ".join(dict.fromkeys(one_grid))
            raise UserError(f"{name}: {nobody} this option, {reason}; leave {name} out.")


def beside(entry: Entry, ready: Ready, drafts: Drafts) -> dict[str, Any]:
    """The draft model and the up-sampler that a sampler takes on a model, by the fields of a :class:`.Drawing`.

    Raises:
        UserError: it lacks a draft model or a decoder.
    """
    if entry.needs_up_sampler and ready.decoder is None:
        raise UserError(f"random: {entry.name} needs a VQ tokenizer, but --random loads none; use --model instead.")

    found: dict[str, Any] = {}
    if entry.needs_draft:
        found["draft"] = drafts.load(entry.name, ready)
    if entry.needs_up_sampler:
        found["up_sampler"] = drafts.up_sampling(ready, found["draft"])
    return found


def stated_defaults(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Settings in the metadata entry ``defaults`` (a JSON object); {} if there is none.

    Raises:
        UserError: it is no JSON object.
    """
    return ck.parse_json(metadata.get("defaults", "{}"), "the entry defaults in the model's metadata", "model")


def defaults(ready: Ready) -> dict[str, Any]:
    """Settings recommended for a model: its file's, else the published ones of its kind.

    A MAR gets no more AR steps than it has tokens.
    """
    out = ready.kind.published(ready.model)
    if "steps" in out:
        out["steps"] = min(out["steps"], ready.tokens)

    return {**out, **stated_defaults(ready.metadata)}


def language_model_for(ready: Ready) -> str:
    """The language model of Tar (a catalogue id) that "auto" selects for a de-tokenizer."""
    demo = any(entry.id == ready.choice and entry.built_in for entry in hub.entries("dtok"))

    return DEMO_TAR if demo else OFFICIAL_TAR


def prompt_settings(stated: Mapping[str, Any], values: Mapping[str, Any]) -> TarPromptSettings:
    """Settings of Tar's language model: ``values``, then what its file states, then the defaults."""
    known = knobs(TarPromptSettings)
    of_file = {name: value for name, value in stated.items() if name in known}

    return settings_from(TarPromptSettings, {**of_file, **values})
