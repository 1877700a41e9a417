"""The steps of a check; each yields lines that say what is expected, what was found, and whether it holds."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import assembly
from ..assembly import AUTO, Drafts, Ready, Source
from ..conditions import ConditionBuilder
from ..errors import UserError, first_line
from ..memory import out_of_memory
from ..model_loaders import families, hub, official
from ..model_loaders.autoencoders import load_kl, load_vq
from ..model_loaders.bitdance import load_binary
from ..model_loaders.checkpoint import is_finite
from ..model_loaders.networks.autoencoder import KLModel, VQModel
from ..model_loaders.networks.bitdance import BlockModel
from ..model_loaders.networks.hybrid import UNCONDITIONAL, HybridModel
from ..model_loaders.networks.janus import JanusModel
from ..model_loaders.networks.llama import TokenModel, is_16_bit
from ..model_loaders.networks.mar import MARModel
from ..model_loaders.networks.ops import packed_bytes
from ..model_loaders.networks.speed import COMPILE, PLAIN, choose
from ..model_loaders.tar import load_ta_tok
from ..model_loaders.tokenizer import load_tokenizer
from ..model_loaders.transfer import readable_size
from ..pipeline import Pipeline
from ..reports.quality import psnr
from ..reports.record import Report, dtype_of
from ..reports.table import percent
from ..samplers import batches
from ..samplers.blocks.memory import estimate as block_memory
from ..samplers.conditioning import AnyCondition, CodeCondition, FeatureCondition, PromptCondition, TextCondition
from ..samplers.driver import finish
from ..samplers.mar.memory import WEIGHTS
from ..samplers.mar.memory import estimate as masked_memory
from ..samplers.presets import BALANCED, EXACT
from ..samplers.registry import SAMPLERS, Entry
from ..samplers.settings import knobs
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.memory import estimate as token_memory
from ..samplers.tokens.memory import estimate_prompt
from ..samplers.tokens.settings import TarPromptSettings
from ..samplers.tokens.tar import tar_prompt
from .machine import Peak, free_memory, watched
from .running import drive
from .subject import Subject

PASS = "pass"
DIFFERS = "differs"
FAILED = "failed"
MEASURED = "measured"
NOT_MEASURED = "not measured"

# Images of a check of exactness, so that a batch differs from an image alone.
IMAGES = 2
# What the estimate of memory leaves to libraries and allocators.
MARGIN = 64_000_000
# Largest difference of latents, relative to the largest latent, that counts as rounding in fp32: the first diffusion
# step multiplies the rounding errors of a batch by hundreds.
ROUNDING = 0.01
# Settings of models with diffusion steps: for checks of exactness, which hold for any number of steps, and for an image
# in little time.
_FEW_STEPS = {"steps": 8, "diffusion_steps": 10}
_QUICK_STEPS = {"steps": 8, "diffusion_steps": 25}
# Largest grid of a token model in a check of exactness, and with --quick.
_GRID = 16
_QUICK_GRID = 8
# Seconds after which a timed run is stopped and extrapolated; the first compiled run may take longer.
_LIMIT = 30.0
_COMPILING = 300.0
# Steps of a run in which launches are counted.
_COUNTED = 4
# Standard deviation of the tokens of an image, whose latents were scaled to one.
_STD = (0.5, 2.0)
# Differences between the largest and the smallest pixel, of 255, below which an image is constant.
_CONTRAST = 3
# Bits of a token that are compared as one number.
_WORD = 62
# A prompt of models that read one, and the label of the others.
PROMPT = "a red boat at sunset"
LABEL = "0"
# The first tokens of Janus-Pro-1B in bf16 on CUDA, drawn greedily at guidance 5 from a text without the template, as a
# test of transformers states them.
_JANUS_TEXT = "A portrait of young girl. masterpiece, film grained, best quality."
_JANUS_TOKENS = [
    *(4484, 4015, 15750, 506, 3758, 11651, 8597, 5739, 4861, 971),
    *(14985, 14834, 15438, 7548, 1820, 1465, 13529, 12761, 10503, 12761),
    *(14303, 6155, 4015, 11766, 705, 15736, 14146, 10417, 1951, 7713),
    *(14305, 15617, 6169, 2706, 8006, 14893, 3855, 10188, 15652, 6297),
    *(1097, 12108, 15038, 311, 14998, 15165, 897, 4044, 1762, 4676),
]
# Ids of the Qwen2.5 tokenizer, as recorded; the template is part of them.
RECORDED = {
    "a photo of a pink stop sign.": [264, 6548, 315, 264, 18217, 2936, 1841, 13],
    "a dog on the left and a cat on the right.": [264, 5562, 389, 279, 2115, 323, 264, 8251, 389, 279, 1290, 13],
}
_BEFORE = [151_644, 872, 198, 31115, 458, 2168, 25]
_AFTER = [151_645, 198, 151_644, 77091, 198]
_UNCONDITIONAL = [*_BEFORE[:-1], 13, *_AFTER]


@dataclass(frozen=True)
class Line:
    """A result of a check."""

    check: str
    expected: str
    found: str
    result: str  # PASS, DIFFERS, FAILED, MEASURED or NOT_MEASURED
    must: bool = True  # whether the model is unsound, or used wrongly, if it does not hold
    figures: Mapping[str, Any] = field(default_factory=dict)  # numbers for the JSON file

    @property
    def broken(self) -> bool:
        """Whether it must hold and does not."""
        return self.must and self.result in (DIFFERS, FAILED)


def holds(check: str, good: bool, expected: str, found: str, must: bool = True, **figures: Any) -> Line:
    """A line that holds or differs."""
    return Line(check, expected, found, PASS if good else DIFFERS, must, figures)


@dataclass
class Check:
    """A check in progress: its options, and what its steps leave for later ones."""

    subject: Subject
    files: Source
    readers: ConditionBuilder  # reads prompts
    seed: int
    prompt: str | None = None  # None: the usual one
    label: str | None = None
    decoder: str = AUTO
    weights: str = AUTO
    quick: bool = False
    path: Path | None = None  # of the model, once it was found
    pipe: Pipeline | None = None  # the loaded model with its decoder
    condition: AnyCondition | None = None  # of IMAGES images, once it was read
    image: np.ndarray | None = None  # uint8 [H, W, 3], once it was drawn
    result: Any = None  # what it was decoded from
    reports: list[Report] = field(default_factory=list)
    stopped: bool = False  # by Ctrl-C

    @property
    def text(self) -> str:
        """The prompt of a model that reads one."""
        return self.prompt or PROMPT

    @property
    def loaded(self) -> Pipeline:
        """The loaded model."""
        assert self.pipe is not None, "a step that needs the model runs after it was loaded"
        return self.pipe

    @property
    def ready(self) -> Ready:
        """The loaded model with its family."""
        return self.loaded.ready

    @property
    def plain(self) -> Entry:
        """The plain sampler of the model."""
        return SAMPLERS[self.loaded.samplers[0]]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.files.device

    def read_condition(self) -> AnyCondition:
        """The condition of IMAGES images: the label, or the prompt, for which further networks may be loaded.

        Raises:
            UserError: a prompt for a model of classes, or a label for one that reads prompts.
        """
        if self.condition is None:
            classes = self.ready.condition == "class"
            if classes and self.prompt is not None:
                raise UserError(f"prompt: {self.loaded.model.name} draws classes; name one with --label.")
            if not classes and self.label is not None:
                raise UserError(f"label: {self.loaded.model.name} reads prompts; give one with --prompt.")

            what = (self.label or LABEL) if classes else self.text
            self.condition = self.loaded.condition(what, images=IMAGES, seed=self.seed)
            self.readers.forget()

        return self.condition

    def any_condition(self) -> AnyCondition:
        """The condition if it was read, or can be without further networks; else random features in its place."""
        kind = self.ready.condition
        if self.condition is not None or kind in ("class", "prompt"):
            return self.read_condition()

        config = self.ready.config
        rows = config.text_rows if kind == "text" else config.absolute - self.ready.tokens + 1
        features = torch.randn(rows, config.condition_size, generator=torch.Generator().manual_seed(0))
        made = TextCondition if kind == "text" else FeatureCondition
        return made((features.to(self.device),) * IMAGES, (self.text,) * IMAGES)


# ------------------------------------------------------------------------------------------------ files


def files(check: Check) -> Iterator[Line]:
    """Find or download the files, and compare them with the digests of the catalogue."""
    what = check.subject
    check.path = check.files.find(what.choice, what.files)
    entry = what.entry
    if entry is None or entry.built_in:
        size = sum(path.stat().st_size for path in _weights_of(check.path))
        yield Line("files", "found", f"{check.path.name}, {readable_size(size)}", PASS)
        return

    parts = [*entry.files, *entry.shards(check.path)]
    required = [part.name for part in parts if not part.optional]
    here = {part.name: check.path if not entry.parts else check.path / part.name for part in parts}
    missing = [name for name in required if not here[name].is_file()]
    size = sum(path.stat().st_size for path in here.values() if path.is_file())
    found = f"{len(required) - len(missing)}, {readable_size(size)}"
    if missing:
        found += f"; {missing[0]} is missing"
    yield holds("files", not missing, f"the {len(required)} of the catalogue", found, bytes=size)

    pinned = {part.name: part.sha256 for part in parts if part.sha256}
    if not pinned:
        yield Line("sha256", "that of the catalogue", "no public record states it", NOT_MEASURED)
    elif check.quick:
        yield Line("sha256", "that of the catalogue", "left out with --quick", NOT_MEASURED)
    else:
        other = [name for name, digest in pinned.items() if here[name].is_file() and _sha256(here[name]) != digest]
        found = f"{other[0]} has another" if other else f"of {', '.join(pinned)}"
        yield holds("sha256", not other, "that of the catalogue", found)


def _weights_of(path: Path) -> list[Path]:
    """The files of a model: itself, or those in its folder."""
    return [path] if path.is_file() else [inner for inner in sorted(path.iterdir()) if inner.is_file()]


def _sha256(path: Path) -> str:
    """Digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            digest.update(chunk)

    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ weights


def weights(check: Check) -> Iterator[Line]:
    """Load the model, and compare names, shapes, dtypes and what is published with the catalogue."""
    assert check.path is not None
    yield _stored_dtype(check, check.path)

    # The first use of this device loads a part of PyTorch, which is no memory of the weights.
    with torch.device("meta"):
        torch.nn.Linear(2, 2)(torch.zeros(1, 2))

    began = time.perf_counter()
    with watched(check.device) as peak:
        net = _load(check)
    seconds = time.perf_counter() - began

    yield _shapes(check, net)
    yield _finite(net)
    if check.pipe is not None and isinstance(check.pipe.model, HybridModel):
        yield from hybrid_facts(check.pipe.model, check.subject.network)

    held = 0
    for part in _all_nets(check, net):
        held += sum(parameter.nbytes for parameter in part.parameters())

    yield _memory_line("memory of the weights", peak, held, f"{readable_size(held)} of weights")
    yield Line("seconds to load", "no published figure", f"{seconds:.1f} s", MEASURED, False, {"seconds": seconds})


def _stored_dtype(check: Check, path: Path) -> Line:
    """The dtype in which the file keeps most weights."""
    if check.subject.files == "tokenizer":
        return Line("dtype of the file", "no weights", "no weights", PASS)

    numbers: dict[torch.dtype, int] = {}
    for tensor in families.read(path, check.subject.files, weights=check.weights).state.values():
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + tensor.numel()
    most = max(numbers, key=lambda dtype: numbers[dtype])
    found = {kind: name for name, kind in families.DTYPES.items()}.get(most, str(most).removeprefix("torch."))

    stated = check.subject.entry.dtype if check.subject.entry else ""
    if not stated:
        return Line("dtype of the file", "not stated by the catalogue", found, MEASURED, False, {"dtype": found})
    return holds("dtype of the file", found == stated, stated, found, dtype=found)


def _load(check: Check) -> Any:
    """Load the model; returns its network. A model that draws becomes ``check.pipe``."""
    what = check.subject
    assert check.path is not None
    if what.family:
        ready = assembly.load(what.family, what.choice, check.files, check.decoder, None, check.weights)
        check.pipe = Pipeline(ready, Drafts(check.files, AUTO, what.choice), check.readers)
        return own_net(ready.model)

    check.result = _load_component(check, check.path)
    return getattr(check.result, "net", torch.nn.Module())


def _load_component(check: Check, path: Path) -> Any:
    """Load a decoder, text encoder, language model, TA-Tok or tokenizer."""
    kind = check.subject.files
    if kind == "kl":
        return load_kl(path, AUTO, check.device)
    if kind == "vq":
        return load_vq(path, AUTO, check.device)
    if kind == "bitdance-ae":
        return load_binary(path, AUTO, check.device)
    if kind == "tar":
        return assembly.load_language_model(check.subject.choice, check.files)[0]
    if kind == "ta-tok":
        return load_ta_tok(path, check.files.dtype, check.device, encoder=False)
    if kind == "t5":
        from ..model_loaders.text import load_text_encoder

        return load_text_encoder(path, AUTO, check.device)

    return load_tokenizer(path, "", {}, "model")


def _all_nets(check: Check, net: Any) -> list[Any]:
    """The loaded networks: the model's and its decoder's."""
    return [net] if check.pipe is None else [net, check.pipe.decoder.net]


def _shapes(check: Check, net: Any) -> Line:
    """Names and shapes against those of the published network."""
    # The scales of 8-bit weights are ours; the published network has none.
    found = {name: shape for name, shape in official.shapes_of(net).items() if not name.endswith(".weight_scale")}
    name = check.subject.network
    about = f"{len(found)} tensors, {sum(map(math.prod, found.values())):,} weights"
    if not name:
        why = "a built-in model" if check.subject.entry else "no entry of the catalogue"
        return Line("names and shapes", f"{why}: its own", about, MEASURED, False)

    wrong = differences(official.shapes(name), found)
    told = f"{about}; {wrong}" if wrong else about
    return holds("names and shapes", not wrong, f"those of {name}", told, tensors=len(found))


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """In what names and shapes differ, with an example; "" if in nothing."""
    for name, shape in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != shape:
            return f"{name} is {_times(found[name])}, not {_times(shape)}"

    more = [name for name in found if name not in expected]
    return f"{more[0]} is none of its weights" if more else ""


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def _finite(net: Any) -> Line:
    """Whether all weights are finite."""
    parameters = dict(net.named_parameters())
    bad = [name for name, p in parameters.items() if p.is_floating_point() and not is_finite(p)]
    found = f"{bad[0]} is not" if bad else f"{len(parameters)} tensors"

    return holds("weights", not bad, "all finite", found)


def hybrid_facts(model: HybridModel, network: str) -> Iterator[Line]:
    """What is known of the published Harmon and UniPic beside their shapes: the largest beta, and ids of prompts."""
    if network not in official.HYBRID_SIZES:
        return

    beta = official.HYBRID_SIZES[network][4]
    yield holds("largest beta", model.max_beta == beta, f"{beta:g}", f"{model.max_beta:g}")

    same = model.instruction(UNCONDITIONAL) == _UNCONDITIONAL
    for text, ids in RECORDED.items():
        same = same and model.prompt(text) == [*_BEFORE, *ids, *_AFTER]
    found = "the same" if same else "others"
    yield holds("ids of prompts", same, f"those recorded of {len(RECORDED) + 1} prompts", found)


# ------------------------------------------------------------------------------------------------ one step


def step(check: Check) -> Iterator[Line]:
    """One AR step, three passes of a token model, or the first block of a BitDance; of a part of a model, one
    evaluation.
    """
    if check.pipe is None:
        yield from _component_step(check)
        return

    entry = check.plain
    settings = batches.short(entry, check.loaded.settings(entry.name))
    condition = check.any_condition().of(range(1))
    need = working_bytes(check.loaded, settings, condition)
    began = time.perf_counter()

    with watched(check.device) as peak:
        batches.run_beginning(begin(check.loaded, entry, settings, condition, check.seed))
    seconds = time.perf_counter() - began

    if entry.latents:
        told = "one AR step with two diffusion steps" if entry.masked else "one block with two diffusion steps"
    else:
        told = "three passes"
    yield Line("first step", "finite", f"{told} in {seconds:.1f} s", PASS, True, {"seconds": seconds})
    yield _memory_line("memory of a step", peak, need)


def _component_step(check: Check) -> Iterator[Line]:
    """One evaluation of a decoder, encoder, language model or tokenizer."""
    model = check.result
    need: float | None = None
    generator = torch.Generator().manual_seed(check.seed)
    began = time.perf_counter()

    with watched(check.device) as peak:
        if isinstance(model, KLModel):
            latents = torch.randn(1, model.net.config.z_channels, _GRID, _GRID, generator=generator)
            need = model.net.decode_bytes(1, _GRID, _GRID)
            if check.device.type == "cpu":
                # oneDNN copies a kernel, and two of the six maps that decode_bytes counts, into its own layout.
                need += need // 3 + max(weight.nbytes for weight in model.net.parameters())
            found = _pixels(model.decode(latents))
        elif isinstance(model, VQModel):
            codes = torch.randint(model.net.config.codes, (1, _GRID, _GRID), generator=generator)
            found = _pixels(model.decode(codes.to(check.device)))
        elif check.subject.files == "t5":
            found = f"features {_times(model.encode([check.text])[0].shape)} of a prompt"
        elif check.subject.files == "tar":
            settings = assembly.prompt_settings({}, {})
            need = packed_bytes(model.net) + estimate_prompt(model, settings, check.text, 1)
            found = _first_codes(model, check.text, settings, check.seed)
        elif check.subject.files == "ta-tok":
            codes = torch.randint(model.net.config.codes, (_GRID**2,), generator=generator)
            features = features_of(CodeCondition((codes,), ("",)), model).features[0]
            found = f"features {_times(features.shape)} of {len(codes)} codes"
        else:
            ids = model.encode(check.text)
            found = f"{len(ids)} ids of a prompt"
    seconds = time.perf_counter() - began

    yield Line("first evaluation", "finite", f"{found} in {seconds:.1f} s", PASS, True, {"seconds": seconds})
    if need is not None:
        yield _memory_line("memory of an evaluation", peak, need)


def _first_codes(model: Any, prompt: str, settings: TarPromptSettings, seed: int) -> str:
    """Begin to write the codes of a prompt."""
    batches.run_beginning(tar_prompt(model, [prompt], settings, PairedDraws(seed, range(1))))
    return "the first codes of a prompt"


def _pixels(images: Tensor) -> str:
    return f"an image {_times(images.shape[1:3])}"


def working_bytes(pipe: Pipeline, settings: Any, condition: AnyCondition) -> float:
    """The estimate of a run's memory beside the weights, as the nodes ask it of ComfyUI; on a CPU with packed copies of
    the weights, which these networks keep outside of ComfyUI.
    """
    packed = packed_bytes(own_net(pipe.model))
    if isinstance(pipe.model, TokenModel):
        return packed + token_memory(pipe.model, condition, settings)

    estimate: Any = masked_memory if isinstance(pipe.model, MARModel) else block_memory
    stages = estimate(pipe.model, condition, settings)
    return packed + sum(count for name, count in stages.items() if not name.startswith(WEIGHTS))


def own_net(model: MARModel | TokenModel | BlockModel) -> torch.nn.Module:
    """All of a model without its decoder."""
    return model.hybrid if isinstance(model, HybridModel) else model.net


def _memory_line(check: str, peak: Peak, need: float, expected: str = "") -> Line:
    """A line on the growth of memory beside its estimate."""
    room = int(MARGIN + need * peak.unused)
    expected = expected or f"at most the estimate of {readable_size(need)}"
    expected = f"{expected} and {readable_size(room)}"
    if peak.bytes is None:
        return Line(check, expected, peak.why, NOT_MEASURED)

    found = readable_size(peak.bytes)
    return holds(check, peak.bytes <= need + room, expected, found, bytes=peak.bytes, estimate=int(need))


def begin(
    pipe: Pipeline, entry: Entry, settings: Any, condition: AnyCondition, seed: int, first: int = 0, model: Any = None
) -> Any:
    """Begin a sampler on all images of a condition; image i uses the noise of (seed, first + i)."""
    chosen = pipe.model if model is None else model
    start = partial(batches.begin, entry, chosen, settings, condition, seed, first)
    return batches.in_parts(start, len(condition), chosen.net)


# ------------------------------------------------------------------------------------------------ an image


def image(check: Check) -> Iterator[Line]:
    """Draw one image with the published settings, or a few steps with --quick."""
    pipe = check.loaded
    entry = check.plain
    settings = pipe.settings(entry.name, **_quick_values(check, _QUICK_STEPS) if check.quick else {})
    condition = check.read_condition().of(range(1))
    batches.warm_up(entry, pipe.model, settings, condition)
    need = working_bytes(pipe, settings, condition)

    with watched(check.device) as peak:
        check.result = drive(begin(pipe, entry, settings, condition, check.seed), entry.title, "steps")
    pixels = assembly.decode(pipe.ready, check.result).numpy()
    check.image = pixels[0]
    report = check.result.report
    check.reports.append(report)

    yield Line("image", "finite", f"{_times(check.image.shape[:2])} pixels", PASS)
    yield _not_constant(check.image)
    yield _spread(check)
    yield _memory_line("memory of an image", peak, need)

    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.phases.items())
    found = f"{report.seconds:.2f} s: {phases}"
    yield Line("seconds of an image", "no published figure", found, MEASURED, False, {"seconds": report.seconds})
    yield _launches(check, entry, settings, condition)
    if check.subject.network == "Janus-Pro-1B":
        yield _janus_tokens(check)


def _janus_tokens(check: Check) -> Line:
    """The published first tokens of Janus-Pro-1B. Another GPU may give others, so that they need not be equal."""
    name = "published first tokens"
    expected = f"{len(_JANUS_TOKENS)} tokens of a test of transformers, on CUDA in bf16"
    model = cast(JanusModel, check.loaded.model)
    if check.device.type != "cuda" or dtype_of(model.net) != "bf16":
        found = f"the model runs on {check.device.type} in {dtype_of(model.net)}"
        return Line(name, expected, found, NOT_MEASURED, False)

    ids = model.tokenize(_JANUS_TEXT)
    template = replace(model.template, user=None, assistant=None)
    bare = replace(model, tokenize=lambda _: ids, template=template)
    settings = check.loaded.settings(check.plain.name, top_k=1)
    condition = PromptCondition(("",))

    steps = begin(check.loaded, check.plain, settings, condition, 0, 0, bare)
    current = next(steps)
    while int(current.decided.sum()) < len(_JANUS_TOKENS):
        current = next(steps)
    steps.close()

    found = current.codes.flatten()[: len(_JANUS_TOKENS)].tolist()
    equal = sum(a == b for a, b in zip(found, _JANUS_TOKENS, strict=True))
    return holds(name, equal == len(_JANUS_TOKENS), expected, f"{equal} equal", False, equal=equal)


def _quick_values(check: Check, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for fewer steps, as far as the model's samplers have them: at most one AR step a token."""
    known = knobs(check.plain.settings)
    found = {name: value for name, value in values.items() if name in known}
    if "steps" in found:
        found["steps"] = min(found["steps"], check.ready.tokens)
    return found


def _not_constant(pixels: np.ndarray) -> Line:
    """Whether an image has contrast."""
    contrast = int(pixels.max()) - int(pixels.min())
    found = f"pixels from {pixels.min()} to {pixels.max()}, std {pixels.std():.1f}"
    return holds("contrast", contrast > _CONTRAST, "not constant", found, std=float(pixels.std()))


def _spread(check: Check) -> Line:
    """The std of a masked model's tokens, the share of bits that are on, or how many values the tokens of an image
    have.
    """
    if check.ready.masked:
        model = cast(MARModel, check.loaded.model)
        std = float(model.to_tokens(check.result.latents.float()).std())
        low, high = _STD
        expected = f"about 1 ({low:g} to {high:g})"
        return holds("std of the tokens", low < std < high, expected, f"{std:.3f}", std=std)

    if check.ready.latents:
        share = float((check.result.latents > 0).float().mean())
        return holds(
            "bits of the tokens", 0 < share < 1, "some on, some off", f"{percent(share, 1)} are on", share=share
        )

    values = len(check.result.codes.unique())
    tokens = check.result.codes.numel()
    return holds("values of the tokens", values > 1, "several", f"{values} among {tokens} tokens", values=values)


def _launches(check: Check, entry: Entry, settings: Any, condition: AnyCondition) -> Line:
    """Launches of kernels a step, from some steps in the middle of a run."""
    name = "launches a step"
    if check.device.type != "cuda":
        return Line(name, "no published figure", f"{check.device.type} has none", NOT_MEASURED, False)

    steps = begin(check.loaded, entry, settings, condition, check.seed)
    current = next(steps)
    middle = current.total // 2
    while current.done < middle:
        current = next(steps)
    before = current.done
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_COUNTED):
            current = next(steps, current)
        torch.cuda.synchronize(check.device)
    steps.close()

    events = profile.key_averages()
    count = sum(event.count for event in events if event.key.startswith(("cudaLaunchKernel", "cudaGraphLaunch")))
    each = count / max(1, current.done - before)
    return Line(name, "no published figure", f"{each:.0f}", MEASURED, False, {"launches": each})


# ------------------------------------------------------------------------------------------------ exactness


def exact(check: Check) -> Iterator[Line]:
    """Whether methods at their exact settings give the plain sampler's image, and a batch those of its images alone."""
    yield from exactness(check, check.loaded)


def exactness(check: Check, pipe: Pipeline) -> Iterator[Line]:
    """The lines of :func:`exact` on a model; in fp32 they must hold, in another dtype they are told."""
    condition = check.any_condition()
    model = smaller(pipe.model, _QUICK_GRID if check.quick else _GRID)
    entry = SAMPLERS[pipe.samplers[0]]
    plain = pipe.settings(entry.name, **_quick_values(check, _FEW_STEPS))

    def run(other: Entry, settings: Any, images: range = range(IMAGES)) -> Tensor:
        steps = begin(pipe, other, settings, condition.of(images), check.seed, images.start, model)
        return drawn(pipe, drive(steps, other.title, "steps"))

    expected = run(entry, plain)
    dtype = dtype_of(pipe.model.net)
    alone = torch.cat([run(entry, plain, range(i, i + 1)) for i in range(IMAGES)])
    yield compared("an image alone and in a batch", alone, expected, dtype)

    if "parallel" in knobs(entry.settings):
        serial = expected
        # In 16 bits, parallel 1 is serial decoding in the shape of the windows.
        if is_16_bit(cast(TokenModel, pipe.model).net):
            serial = run(entry, replace(plain, parallel=1))
            yield compared("parallel 0 and 1", expected, serial, dtype)

        windows = run(entry, replace(plain, parallel=model.grid))
        yield compared("parallel decoding", windows, serial, dtype)

    for other, settings in _exact_settings(check, pipe, model):
        if other.needs_draft:
            other = replace(other, run=partial(other.run, draft=model))
        yield compared(f"{other.title}, exact", run(other, settings), expected, dtype)


def _exact_settings(check: Check, pipe: Pipeline, model: Any) -> Iterator[tuple[Entry, Any]]:
    """Other samplers of a model with settings at which they promise the plain sampler's images."""
    values = _quick_values(check, _FEW_STEPS)
    for name in pipe.samplers[1:]:
        entry = SAMPLERS[name]
        if entry.needs_codes:  # MuLo-SD needs a model of a smaller image
            continue

        settings = pipe.settings(name, EXACT, **values)
        side = cast(MARModel, pipe.model).net.config.grid if entry.masked else model.grid
        if settings.exact(side):
            yield entry, settings


def smaller(model: Any, most: int) -> Any:
    """A token model for images of at most ``most`` tokens per side; a masked model as it is."""
    if not isinstance(model, TokenModel):
        return model

    across = math.isqrt(model.regions)
    grid = min(model.grid, most)
    return replace(model, grid=max(across, grid - grid % across))


def drawn(pipe: Pipeline, result: Any) -> Tensor:
    """What a sampler of the model drew: latents of a masked model, else tokens int64."""
    if pipe.ready.masked:
        return result.latents
    if not pipe.ready.latents:
        return result.codes

    # The bits of a token as one number; of more than 62 bits as several.
    words = [part.movedim(1, -1) for part in (result.latents > 0).long().split(_WORD, 1)]
    numbers = [(word << torch.arange(word.shape[-1], device=word.device)).sum(-1) for word in words]
    return torch.stack(numbers, 1)


def compared(check: str, found: Tensor, expected: Tensor, dtype: str, must: bool = True) -> Line:
    """A line on whether two results are equal: tokens exactly, latents up to rounding.

    Only in fp32 it must hold.
    """
    name = f"{check} ({dtype})"
    strict = must and dtype == "fp32"
    if expected.is_floating_point():
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
        told = f"largest difference {difference:.1e} of the largest latent"
        return holds(
            name, difference <= ROUNDING, f"equal up to rounding ({ROUNDING:g})", told, strict, difference=difference
        )

    equal = float((found == expected).float().mean())
    images = float((found == expected).flatten(1).all(1).float().mean())
    told = f"{percent(equal, 1)} of the tokens, {percent(images)} of the images"
    return holds(name, equal == 1, "equal", told, strict, equal_tokens=equal, equal_images=images)


# ------------------------------------------------------------------------------------------------ speed


def timed(steps: Any, device: torch.device, limit: float) -> tuple[float, bool, Any]:
    """Seconds of a sampler, whether they are extrapolated from the steps within ``limit`` seconds, and the report."""
    synchronize(device)
    began = time.perf_counter()

    try:
        while True:
            current = next(steps)
            if time.perf_counter() - began > limit:
                synchronize(device)
                seconds = (time.perf_counter() - began) * current.total / current.done
                steps.close()
                return seconds, current.done < current.total, current.report
    except StopIteration as end:
        synchronize(device)
        return time.perf_counter() - began, False, end.value.report


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def samplers(check: Check) -> Iterator[Line]:
    """Seconds of every sampler with its balanced preset, beside the plain one's."""
    pipe = check.loaded
    condition = check.any_condition().of(range(1))
    base = 0.0

    for name in pipe.samplers:
        entry = SAMPLERS[name]
        label = f"seconds of {entry.title}"
        absent = _absent_draft(check, entry)
        if absent:
            yield Line(label, "fewer than the plain sampler's", absent, NOT_MEASURED, False)
            continue

        preset = {} if entry is check.plain or name == "par" else {"preset": BALANCED}
        settings = pipe.settings(name, **preset)
        entry = assembly.complete(entry, pipe.ready, pipe.drafts)
        batches.warm_up(entry, pipe.model, settings, condition)

        steps = begin(pipe, entry, settings, condition, check.seed)
        seconds, extrapolated, report = timed(steps, check.device, _LIMIT)
        check.reports.append(report)
        told = f"{'about ' if extrapolated else ''}{seconds:.2f} s"
        if not base:
            base = seconds
            yield Line(label, "no published figure", told, MEASURED, False, {"seconds": seconds})
            continue

        accepted = f", {percent(report.acceptance)} of the drafts accepted" if report.acceptance is not None else ""
        told = f"{told}, {base / seconds:.2f}x{accepted}"
        yield holds(label, seconds < base, f"fewer than {base:.2f} s", told, False, seconds=seconds)


def _absent_draft(check: Check, entry: Entry) -> str:
    """Why a sampler's draft model is not there; "" if it is, or none is needed."""
    if not entry.needs_draft:
        return ""

    draft = hub.draft_for(check.subject.choice)
    if draft is None:
        return "the catalogue has no draft model for it"
    known = next(one for one in hub.entries(check.subject.files) if one.id == draft)
    if known.built_in:
        return ""
    return f"its draft model is a download: compare --samplers {entry.name} --draft {draft} runs it"


def compilation(check: Check) -> Iterator[Line]:
    """Plain against compiled: the result, and the seconds."""
    pipe = check.loaded
    net = pipe.model.net
    entry = check.plain
    condition = check.any_condition().of(range(1))
    model = smaller(pipe.model, _QUICK_GRID if check.quick else _GRID)
    settings = pipe.settings(entry.name, **_quick_values(check, _FEW_STEPS))

    def run(seconds: float) -> tuple[Tensor, float]:
        synchronize(check.device)
        began = time.perf_counter()
        made = drawn(pipe, finish(begin(pipe, entry, settings, condition, check.seed, 0, model)))
        synchronize(check.device)
        return made, time.perf_counter() - began

    expected, _ = run(_LIMIT)
    _, plain = run(_LIMIT)
    try:
        choose(net, COMPILE, check.device)
        found, first = run(_COMPILING)
        _, later = run(_LIMIT)
    finally:
        choose(net, PLAIN, check.device)

    yield compared("compiled and plain", found, expected, dtype_of(net), must=expected.is_floating_point())
    told = f"{later:.2f} s, and {first:.1f} s with the compilation"
    yield holds("seconds compiled", later < plain, f"fewer than {plain:.2f} s", told, False, seconds=later, first=first)


def dtype(check: Check) -> Iterator[Line]:
    """The model's dtype against fp32: the image, and the exactness in fp32."""
    pipe = check.loaded
    own = dtype_of(pipe.model.net)
    if own == "fp32":
        yield Line("dtype against fp32", "close", "the model is in fp32", NOT_MEASURED, False)
        return

    need = 4 * sum(p.numel() for p in pipe.model.net.parameters())
    free = free_memory(check.device)
    if free is not None and need > free:
        found = f"fp32 needs {readable_size(need)}, and {readable_size(free)} are free"
        yield Line("dtype against fp32", "close", found, NOT_MEASURED, False)
        return

    files = replace(check.files, dtype="fp32")
    ready = assembly.load(check.subject.family, check.subject.choice, files, check.decoder, None, check.weights)
    full = Pipeline(ready, Drafts(files, AUTO, check.subject.choice), check.readers)
    if check.result is not None and check.image is not None:
        entry = check.plain
        settings = full.settings(entry.name, **_quick_values(check, _QUICK_STEPS) if check.quick else {})
        condition = check.read_condition().of(range(1))
        result = drive(begin(full, entry, settings, condition, check.seed), f"{entry.title}, fp32", "steps")
        yield _against_fp32(check, own, result, assembly.decode(full.ready, result).numpy()[0])

    yield from exactness(check, full)


def _against_fp32(check: Check, own: str, result: Any, pixels: np.ndarray) -> Line:
    """The image in the model's dtype beside the one in fp32."""
    assert check.image is not None
    close = psnr(check.image, pixels)
    found = "the same image" if math.isinf(close) else f"PSNR {close:.1f} dB"
    figures: dict[str, Any] = {} if math.isinf(close) else {"psnr": close}
    if not check.ready.masked:
        equal = float((drawn(check.loaded, check.result) == drawn(check.loaded, result)).float().mean())
        found += f", {percent(equal, 1)} of the tokens equal"
        figures["equal_tokens"] = equal

    return Line(f"{own} against fp32", "close; no published figure", found, MEASURED, False, figures)


# ------------------------------------------------------------------------------------------------ all steps


@dataclass(frozen=True)
class Step:
    """A part of a check."""

    run: Callable[[Check], Iterator[Line]]
    about: str  # what it does, for --help
    draws: bool = True  # whether it is for models that draw, not for decoders and encoders
    loaded: bool = True  # whether it needs the loaded model
    long: bool = False  # whether --quick leaves it out
    must: bool = True  # whether it has to be possible


STEPS = {
    "files": Step(files, "finds or downloads the files; their digests", draws=False, loaded=False),
    "weights": Step(weights, "names, shapes and dtypes against the catalogue; finite", draws=False, loaded=False),
    "step": Step(step, "one AR step; its memory against the estimate", draws=False),
    "image": Step(image, "one image: finite, not constant; memory, seconds by phase"),
    "exact": Step(exact, "exact settings and batches against plain sampling"),
    "samplers": Step(samplers, "seconds of every sampler", long=True, must=False),
    "compile": Step(compilation, "plain against compiled", long=True, must=False),
    "dtype": Step(dtype, "the dtype against fp32, and exactness in fp32", long=True, must=False),
}


def run_steps(check: Check, names: Sequence[str], seconds: float, tell: Callable[[Line], None]) -> list[Line]:
    """Run steps one after another. One that fails becomes a line, and the others go on.

    Args:
        check: the check.
        names: of the steps, keys of :data:`STEPS`.
        seconds: after which no further line is begun.
        tell: called with every line.
    """
    lines: list[Line] = []

    def add(line: Line) -> None:
        lines.append(line)
        tell(line)

    began = time.perf_counter()
    for name, one in STEPS.items():
        if name not in names or one.draws and not check.subject.family:
            continue

        reason = _left_out(check, one, time.perf_counter() - began > seconds, seconds)
        if reason:
            add(Line(name, one.about, reason, NOT_MEASURED, False))
            continue

        try:
            for line in one.run(check):
                add(line)
                if time.perf_counter() - began > seconds:
                    add(Line(name, f"the rest of: {one.about}", _OVER.format(seconds), NOT_MEASURED, False))
                    break
        except KeyboardInterrupt:
            check.stopped = True
            add(Line(name, one.about, "stopped", NOT_MEASURED, False))
            break
        except UserError as error:
            add(Line(name, one.about, str(error), FAILED if one.must else NOT_MEASURED, one.must))
        except Exception as error:  # whatever a step of an unknown machine raises, the others may run
            if out_of_memory(error) and not one.must:
                add(Line(name, one.about, f"memory is insufficient ({first_line(error)})", NOT_MEASURED, False))
            else:
                add(Line(name, one.about, f"{type(error).__name__}: {first_line(error)}", FAILED))

    return lines


_OVER = "the {:g} seconds were over"


def _left_out(check: Check, one: Step, over: bool, seconds: float) -> str:
    """Why a step is not run; "" if it is."""
    if one.long and check.quick:
        return "left out with --quick"
    if over:
        return _OVER.format(seconds)
    if one.run is weights and check.path is None:
        return "the files could not be found"
    if one.loaded and check.pipe is None and check.result is None:
        return "the model could not be loaded"
    return ""
