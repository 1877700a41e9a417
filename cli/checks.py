"""The steps of a check: files, loading, then an image and its seconds; of a part of a model, one evaluation.

Each yields the lines of the table as soon as they are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, first_line
from ..model_loaders import kinds
from ..model_loaders.catalogue import hub, official
from ..model_loaders.catalogue.transfer import readable_size, sha256_of
from ..model_loaders.files.tokenizer import load_tokenizer
from ..model_loaders.tar.loader import load_ta_tok
from ..networks.autoencoder import KLModel, VQModel
from ..networks.ops import packed_bytes
from ..pipeline import Pipeline
from ..reports.record import Report, dtype_of, dtype_of_weights
from ..reports.timing import shown_seconds
from ..runs import batches
from ..runs.answers import answer_bytes
from ..runs.conditions import ConditionBuilder
from ..runs.drawing import Drawing, decode
from ..runs.loading import (
    AUTO,
    LANGUAGE,
    READER,
    Drafts,
    Ready,
    Source,
    beside,
    load,
    load_language_model,
    prompt_settings,
)
from ..runs.memory.tokens import estimate_prompt
from ..runs.presets import BALANCED
from ..runs.registry import FAMILIES, SAMPLERS, Entry
from ..samplers.conditioning import AnyCondition, CodeCondition, FeatureCondition, TextCondition
from ..samplers.tokens.features import features_of
from ..samplers.tokens.tar import tar_prompt
from ..samplers.tokens.token_noise import TokenNoise
from .machine import Peak, watched
from .planning import Planned
from .running import draw, warm_up
from .subject import Subject

PASS = "pass"
DIFFERS = "differs"
FAILED = "failed"
MEASURED = "measured"
NOT_MEASURED = "not measured"

# What the estimate of memory leaves to libraries and allocators.
MARGIN = 64_000_000
# Difference between the largest and the smallest pixel, of 255, up to which an image is constant.
_CONTRAST = 3
# Side of the latents or codes with which a decoder or encoder is tried.
_GRID = 16
# A prompt of models that read one, and the label of the others.
PROMPT = "a red boat at sunset"
LABEL = "0"
# What is asked about an image, what is changed in it, and the most tokens of the answer.
QUESTION = "Describe this image in one sentence."
EDIT = "make it night"
_ANSWER = 16
# Upper estimate of the activations of a vision tower for one image.
_READER_BYTES = 256 << 20


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    check: str
    found: str
    expected: str = ""
    result: str = MEASURED  # PASS, DIFFERS, FAILED, MEASURED or NOT_MEASURED
    figures: Mapping[str, Any] = field(default_factory=dict)  # numbers for the JSON file

    @property
    def broken(self) -> bool:
        """Whether something is wrong."""
        return self.result in (DIFFERS, FAILED)


def compared(check: str, good: bool, found: str, expected: str, **figures: Any) -> Line:
    """A line on whether what was found is what was expected."""
    return Line(check, found, expected, PASS if good else DIFFERS, figures)


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
    path: Path | None = None  # of the model, once it was found
    pipe: Pipeline | None = None  # a model that draws, with its decoder
    part: Any = None  # a decoder, encoder, language model or tokenizer
    image: np.ndarray | None = None  # uint8 [H, W, 3], once it was drawn
    reports: list[Report] = field(default_factory=list)  # of the image, and of every other sampler
    stopped: bool = False  # by Ctrl-C

    @property
    def found(self) -> Path:
        """Where the model is."""
        assert self.path is not None, "the files are found first"
        return self.path

    @property
    def loaded(self) -> Pipeline:
        """The model."""
        assert self.pipe is not None, "a model is loaded before it draws"
        return self.pipe

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.files.device

    def planned(self, name: str, **settings: Any) -> Planned:
        """A sampler of the model, with the published settings and these."""
        made = self.loaded.settings(name, **settings)
        return Planned(SAMPLERS[name], made, {}, ready=self.loaded.ready)

    def condition(self) -> AnyCondition:
        """The label or the prompt, for which further networks may be loaded.

        Raises:
            UserError: a prompt for a model of classes, or a label for one that reads prompts.
        """
        classes = self.loaded.ready.condition == "class"
        if classes and self.prompt is not None:
            raise UserError(f"prompt: {self.loaded.model.name} reads a class, not a prompt; name a class with --label.")
        if not classes and self.label is not None:
            raise UserError(
                f"label: {self.loaded.model.name} reads a prompt, not a class; give a prompt with --prompt."
            )

        what = (self.label or LABEL) if classes else (self.prompt or PROMPT)
        condition = self.loaded.condition(what, seed=self.seed)
        self.readers.forget()
        return condition


def stand_in(ready: Ready, images: int = 1) -> AnyCondition:
    """Random features for a model whose condition another, large network computes."""
    config = ready.config
    encoded = ready.condition == "text"
    rows = config.text_rows if encoded else config.absolute - ready.tokens + 1
    features = torch.randn(rows, config.condition_size, generator=torch.Generator().manual_seed(0))

    made = TextCondition if encoded else FeatureCondition
    return made((features.to(ready.device),) * images, (PROMPT,) * images)


# ------------------------------------------------------------------------------------------------ files


def files(check: Check) -> Iterator[Line]:
    """Find or download the files, and compare them with the catalogue."""
    what = check.subject
    check.path = check.files.find(what.choice, what.files)
    entry = what.entry
    if entry is None or entry.built_in:
        inside = [check.path] if check.path.is_file() else check.path.iterdir()
        size = sum(path.stat().st_size for path in inside if path.is_file())
        yield Line("files", f"{check.path.name}, {readable_size(size)}", result=PASS, figures={"bytes": size})
        return

    parts = [*entry.files, *entry.shards(check.path)]
    place = {part.name: check.path / part.name if entry.parts else check.path for part in parts}
    here = [name for name, path in place.items() if path.is_file()]
    needed = [part.name for part in parts if not part.optional]
    missing = [name for name in needed if name not in here]

    size = sum(place[name].stat().st_size for name in here)
    found = f"{missing[0]} is missing" if missing else f"{len(needed)} files, {readable_size(size)}"
    yield compared("files", not missing, found, f"the {len(needed)} files in the catalogue", bytes=size)

    pinned = {part.name: part.sha256 for part in parts if part.sha256 and part.name in here}
    if not pinned:
        yield Line("sha256", "no public record states the sha256", result=NOT_MEASURED)
        return

    other = [name for name, digest in pinned.items() if sha256_of(place[name]) != digest]
    same = f"the same for {len(pinned)} files" if len(pinned) > 1 else "the same"
    found = f"{other[0]} has a different sha256" if other else same
    yield compared("sha256", not other, found, "the sha256 in the catalogue")


# ------------------------------------------------------------------------------------------------ loading


def loading(check: Check) -> Iterator[Line]:
    """Load the model, and compare its names, shapes and dtype with the catalogue, and its memory with the weights."""
    # The first use of a device loads a part of PyTorch, which is no memory of the weights.
    with torch.device("meta"):
        torch.nn.Linear(2, 2)(torch.zeros(1, 2))

    began = time.perf_counter()
    with watched(check.device) as peak:
        nets = _load(check)
    seconds = time.perf_counter() - began

    yield _shapes("names and shapes", check.subject.network, nets[0])
    if check.subject.files != "tokenizer":
        yield _dtype(check, nets[0])

    held = sum(weight.nbytes for net in nets for weight in net.parameters())
    yield _memory("memory of the weights", peak, held)
    yield Line("seconds to load", f"{seconds:.1f}", figures={"seconds": seconds})


def _load(check: Check) -> list[torch.nn.Module]:
    """Load the model, or part of one; its networks, its own first."""
    what = check.subject
    if not what.family:
        check.part = _load_part(check)
        return [getattr(check.part, "net", torch.nn.Module())]

    ready = load(what.family, what.choice, check.files, check.decoder, None, check.weights)
    check.pipe = Pipeline(ready, Drafts(check.files, AUTO, what.choice), check.readers)
    return [ready.kind.network(ready.model), check.pipe.decoder.net]


def _load_part(check: Check) -> Any:
    """Load a decoder, text encoder, language model, TA-Tok or tokenizer."""
    kind = check.subject.files
    decoders = {family.decoder: family.load_decoder for family in FAMILIES.values()}
    if kind in decoders:
        return decoders[kind](check.found, AUTO, check.device)
    if kind == LANGUAGE:
        return load_language_model(check.subject.choice, check.files)[0]
    if kind == READER:
        return load_ta_tok(check.found, check.files.dtype, check.device, encoder=False)
    if kind == "t5":
        from ..model_loaders.llamagen.text import load_text_encoder

        return load_text_encoder(check.found, AUTO, check.device)

    return load_tokenizer(check.found, "", {}, "model")


def _shapes(check: str, network: str, net: torch.nn.Module) -> Line:
    """Names and shapes against those of the published network; "" if there is none."""
    # The scales of 8-bit weights are ours; the published network has none.
    found = {name: shape for name, shape in official.shapes_of(net).items() if not name.endswith(".weight_scale")}
    about = f"{sum(map(math.prod, found.values())):,} weights in {len(found)} tensors"
    if not network:
        return Line(check, about)

    wrong = differences(official.shapes(network), found)
    return compared(check, not wrong, wrong or about, f"those of {network}", tensors=len(found))


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """In what names and shapes differ, with an example; "" if in nothing."""
    for name, shape in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != shape:
            return f"{name} is {_times(found[name])}, not {_times(shape)}"

    more = [name for name in found if name not in expected]
    return f"{more[0]} is not one of its weights" if more else ""


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def _dtype(check: Check, net: torch.nn.Module) -> Line:
    """The dtype of most weights as the file stores them and as they were loaded."""
    read = kinds.read(check.found, check.subject.files, weights=check.weights)
    stored = dtype_of_weights(read.state.values())
    loaded = dtype_of(net)
    figures = {"stored": stored, "loaded": loaded}

    found = stored if stored == loaded else f"{stored}, loaded as {loaded}"
    stated = check.subject.entry.dtype if check.subject.entry else ""
    if not stated:
        return Line("dtype", found, figures=figures)
    return compared("dtype", stored == stated, found, f"{stated} in the file", **figures)


def _memory(check: str, peak: Peak, need: float) -> Line:
    """A line on the growth of memory beside its estimate."""
    expected = f"about {readable_size(need)}"
    if peak.bytes is None:
        return Line(check, peak.why, expected, NOT_MEASURED)

    fits = peak.bytes <= need + MARGIN + need * peak.unused
    return compared(check, fits, readable_size(peak.bytes), expected, bytes=peak.bytes, estimate=int(need))


# ------------------------------------------------------------------------------------------------ a model


def first_step(check: Check) -> Iterator[Line]:
    """One AR step, three passes of a token model, or the first block of a BitDance."""
    planned = check.planned(check.loaded.samplers[0])
    reads_alone = check.loaded.ready.condition in ("class", "prompt")
    condition = check.condition() if reads_alone else stand_in(check.loaded.ready)
    need = working_bytes(planned.drawing(condition, check.seed).short())

    began = time.perf_counter()
    with watched(check.device) as peak:
        warm_up(planned, condition)
    seconds = time.perf_counter() - began

    yield Line("first step", f"{seconds:.1f} s", result=PASS, figures={"seconds": seconds})
    yield _memory("memory of a step", peak, need)


def image(check: Check) -> Iterator[Line]:
    """Draw one image with the published settings, then its seconds with every other sampler that the model has."""
    plain, *others = check.loaded.samplers
    planned = check.planned(plain)
    condition = check.condition()
    warm_up(planned, condition)
    need = working_bytes(planned.drawing(condition, check.seed))

    with watched(check.device) as peak:
        made = draw(planned, condition, check.seed)
    check.image = decode(planned.on, made).numpy()[0]
    check.reports.append(made.report)

    contrast = int(check.image.max()) - int(check.image.min())
    size = f"{_times(check.image.shape[:2])} pixels"
    found = size if contrast > _CONTRAST else f"{size}, constant"
    yield compared("image", contrast > _CONTRAST, found, "finite, not constant", contrast=contrast)
    yield _memory("memory of an image", peak, need)

    yield _seconds(planned.entry, made.report)
    for name in others:
        yield _accelerated(check, SAMPLERS[name], condition, made.report)


def _seconds(entry: Entry, report: Report, more: str = "") -> Line:
    """The seconds of a sampler for one image."""
    found = f"{shown_seconds(report.seconds)}{more}"
    return Line(f"seconds of {entry.title}", found, figures={"seconds": report.seconds})


def _accelerated(check: Check, entry: Entry, condition: AnyCondition, plain: Report) -> Line:
    """The seconds of a sampler with its balanced preset beside those of the plain sampler."""
    title = f"seconds of {entry.title}"
    absent = _absent_draft(check, entry)
    if absent:
        return Line(title, absent, result=NOT_MEASURED)

    try:
        planned = check.planned(entry.name, preset=BALANCED)
        planned = replace(planned, beside=beside(entry, planned.on, check.loaded.drafts))
        warm_up(planned, condition)
        report = draw(planned, condition, check.seed).report
    except UserError as error:  # too little memory for a draft model, say; the model itself has drawn
        return Line(title, str(error), result=NOT_MEASURED)

    check.reports.append(report)
    speedup = report.speedup(plain)
    return _seconds(entry, report, f", {speedup.short}" if speedup else "")


def _absent_draft(check: Check, entry: Entry) -> str:
    """Why a sampler's draft model is not there; "" if it is, or none is needed."""
    if not entry.needs_draft:
        return ""

    draft = hub.draft_for(check.subject.choice)
    if draft is None:
        return "no draft model in the catalogue"

    known = next(one for one in hub.entries(check.subject.files) if one.id == draft)
    return "" if known.built_in else f"measure it with compare --samplers {entry.name} --draft {draft}"


def reading(check: Check) -> Iterator[Line]:
    """What a model reads of an image: an answer about one, and of a model that edits its first passes."""
    model: Any = check.loaded.model
    ready = check.loaded.ready
    answers = getattr(model, "vision_file", None) is not None
    if not answers and not getattr(model, "edits", False):
        return

    reader = check.readers.image_reader(ready)
    image = check.image if check.image is not None else _gradient(reader.side)
    if answers:
        yield from _answering(check, reader, image)

    # 3. An edit.
    if not model.edits:
        return
    planned = check.planned(check.loaded.samplers[0])
    condition = check.readers.image_prompts(ready, [EDIT], image)
    need = working_bytes(planned.drawing(condition, check.seed).short())
    with watched(check.device) as peak:
        warm_up(planned, condition)
    yield _memory("memory of an edit", peak, need)


def _answering(check: Check, reader: Any, image: np.ndarray) -> Iterator[Line]:
    """The vision tower of a Janus, and its answer about an image."""
    model: Any = check.loaded.model

    # 1. The vision tower, and the output layer for words.
    check.readers.word_head(check.loaded.ready)
    network = check.subject.network
    yield _shapes("vision tower", official.vision_of(network) if network else "", reader.net)

    # 2. An answer.
    need = max(_READER_BYTES, answer_bytes(model, model.question(QUESTION), _ANSWER)) + packed_bytes(model.net)
    with watched(check.device) as peak:
        answer = check.loaded.ask(image, QUESTION, limit=_ANSWER)
    yield Line("answer", answer or "no words", figures={"text": answer})
    yield _memory("memory of an answer", peak, need)


def _gradient(side: int) -> np.ndarray:
    """An image uint8 [side, side, 3] to read."""
    ramp = np.linspace(0, 255, side).astype(np.uint8)
    return np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], 128), axis=-1).astype(np.uint8)


def working_bytes(drawing: Drawing) -> float:
    """The estimate of a run's memory beside the weights, as the nodes ask it of ComfyUI; on a CPU with packed copies of
    the weights, which these networks keep outside of ComfyUI.
    """
    return packed_bytes(drawing.family.network(drawing.model)) + drawing.working()


# ------------------------------------------------------------------------------------------------ part of a model


def evaluation(check: Check) -> Iterator[Line]:
    """One evaluation of a decoder, encoder, language model or tokenizer."""
    part = check.part
    prompt = check.prompt or PROMPT
    need: float | None = None
    generator = torch.Generator().manual_seed(check.seed)
    began = time.perf_counter()

    with watched(check.device) as peak:
        if isinstance(part, KLModel):
            latents = torch.randn(1, part.net.config.z_channels, _GRID, _GRID, generator=generator)
            need = part.net.decode_bytes(1, _GRID, _GRID)
            if check.device.type == "cpu":
                # oneDNN copies a kernel, and two of the six maps that decode_bytes counts, into its own layout.
                need += need // 3 + max(weight.nbytes for weight in part.net.parameters())
            found = _pixels(part.decode(latents))
        elif isinstance(part, VQModel):
            codes = torch.randint(part.net.config.codes, (1, _GRID, _GRID), generator=generator)
            found = _pixels(part.decode(codes.to(check.device)))
        elif check.subject.files == "t5":
            found = f"features {_times(part.encode([prompt])[0].shape)}"
        elif check.subject.files == LANGUAGE:
            settings = prompt_settings({}, {})
            need = packed_bytes(part.net) + estimate_prompt(part, settings, prompt, 1)
            batches.run_beginning(tar_prompt(part, [prompt], settings, TokenNoise(check.seed, range(1))))
            found = "the first codes of a prompt"
        elif check.subject.files == READER:
            codes = torch.randint(part.net.config.codes, (_GRID**2,), generator=generator)
            features = features_of(CodeCondition((codes,), ("",)), part).features[0]
            found = f"features {_times(features.shape)}"
        else:
            found = f"{len(part.encode(prompt))} ids of a prompt"
    seconds = time.perf_counter() - began

    yield Line("first evaluation", f"{found} in {seconds:.1f} s", result=PASS, figures={"seconds": seconds})
    if need is not None:
        yield _memory("memory of an evaluation", peak, need)


def _pixels(images: Tensor) -> str:
    return f"an image {_times(images.shape[1:3])}"


# ------------------------------------------------------------------------------------------------ all steps


def run_steps(check: Check, quick: bool, tell: Callable[[Line], None]) -> list[Line]:
    """Run the steps; what is raised becomes the last line.

    Args:
        check: the check.
        quick: whether a model takes one step in place of an image.
        tell: called with every line.
    """
    steps: list[Callable[[Check], Iterator[Line]]] = [files, loading, evaluation]
    if check.subject.family:
        steps[2:] = [first_step if quick else image, reading]

    lines: list[Line] = []
    for step in steps:
        name = step.__name__.replace("_", " ")
        try:
            for line in step(check):
                lines.append(line)
                tell(line)
        except KeyboardInterrupt:
            check.stopped = True
            problem = Line(name, "stopped", result=NOT_MEASURED)
        except UserError as error:
            problem = Line(name, str(error), result=FAILED)
        except Exception as error:  # whatever a model raises on an unknown machine, the file for an issue is written
            problem = Line(name, f"{type(error).__name__}: {first_line(error)}", result=FAILED)
        else:
            continue

        lines.append(problem)
        tell(problem)
        break

    return lines
