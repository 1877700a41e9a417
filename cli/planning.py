"""The samplers of a run with their settings and models, by the options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from ..errors import UserError, did_you_mean
from ..reports.record import compared
from ..runs import loading, presets
from ..runs.baseline import ComparedRun, baselines
from ..runs.choice import PRESET, ModelFacts, assignment, choose, names_of_settings, parse_settings
from ..runs.drawing import Drawing
from ..runs.loading import AUTO, DEMO, USUAL, Drafts, Ready, beside, identified
from ..runs.registry import FAMILIES, Entry, find
from ..samplers.conditioning import AnyCondition
from ..samplers.settings import check_removed, settings_from, unknown_setting_error
from ..samplers.tokens.tar import TarPromptSettings
from .models import choose_models
from .options import MODEL_OPTIONS, source, whole

# Prefix of the settings of Tar's language model in --set.
PROMPT = "prompt"

V = TypeVar("V")


@dataclass(frozen=True)
class Planned:
    """A sampler of a run."""

    entry: Entry
    settings: Any
    asked: dict[str, str]  # settings given for this sampler by name
    variant: str = ""  # text after the colon in --samplers, a label or settings
    ready: Ready | None = None  # its model; None while only the options are checked
    beside: Mapping[str, Any] = field(default_factory=dict)  # its draft model and up-sampler, see loading.beside

    @property
    def label(self) -> str:
        """Label of its image and table row."""
        if self.variant and not is_settings(self.variant):
            return f"{self.entry.title}, {self.variant}"

        asked = [f"{name.replace('_', ' ')} {value}" for name, value in self.asked.items()]
        return " ".join([self.entry.title, *asked])

    @property
    def on(self) -> Ready:
        """Its model."""
        assert self.ready is not None, "planned without a model"
        return self.ready

    def drawing(self, condition: AnyCondition, seed: int, first: int = 0) -> Drawing:
        """A run of it; image i of the batch uses (seed, first + i)."""
        numbers = range(first, first + len(condition))
        return Drawing(self.entry, self.on.model, self.settings, condition, seed, numbers, **self.beside)


def prepare(
    options: argparse.Namespace, read: Callable[[argparse.Namespace, list[Entry]], Mapping[str, Ready]] | None = None
) -> tuple[list[Planned], dict[str, str]]:
    """The samplers of the options with their models, without drafts, and the settings of Tar's language model by name.

    ``read`` takes the place of :func:`load`.
    """
    samplers = usual_samplers(options)
    sets, asked = of_prompt(options.sets)

    # Without models first, which reports mistakes before anything is loaded.
    entries = [p.entry for p in plan(samplers, sets, {})]
    ready = (read or load)(options, entries)

    return plan(samplers, sets, ready), asked


def of_prompt(sets: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split --set into the settings of samplers, and by name those of Tar's language model (checked)."""
    others: list[str] = []
    asked: dict[str, str] = {}
    for text in sets:
        if text.partition("=")[0].strip().startswith(f"{PROMPT}."):
            name, value = assignment(text, "set")
            asked[name.removeprefix(f"{PROMPT}.")] = value
        else:
            others.append(text)

    settings_from(TarPromptSettings, asked)
    return others, asked


def usual_samplers(options: argparse.Namespace) -> str:
    """The value of --samplers, or the samplers that suit the model."""
    if options.samplers is not None:
        return options.samplers

    demo = options.model == DEMO
    if demo:
        family = next(name for name, one in FAMILIES.items() if one.demo and (one.reads_prompts or not options.text))
        names = FAMILIES[family].usual_samplers
    else:
        family, names = identified(options.model, source(options))
        family = family or USUAL
        names = names or FAMILIES[family].usual_samplers

    has_draft = demo or options.draft != AUTO
    if has_draft and names == FAMILIES[family].usual_samplers:
        names += FAMILIES[family].drafted_samplers
    return ",".join(names)


def load(options: argparse.Namespace, entries: Iterable[Entry]) -> dict[str, Ready]:
    """Load the model of each sampler, by its name: that of the options, or the demo's of the sampler's family."""
    entries = list(dict.fromkeys(entries))
    files = source(options)
    labelled = getattr(options, "label", None) is not None
    chosen = choose_models(options.model, entries, files, bool(options.text), labelled)

    families = {family for family, _ in chosen.values()}
    if options.model == DEMO and options.decoder != AUTO and len(families) > 1:
        raise UserError(
            "decoder: the samplers of this run belong to different families of models, each with its own decoder; "
            "leave decoder at auto."
        )

    # Several samplers may have the same model.
    loaded: dict[str, Ready] = {}
    for family, choice in dict.fromkeys(chosen.values()):
        grid = None if options.grid is None else whole(options.grid, "grid", 2, 128)
        loaded[choice] = loading.load(family, choice, files, options.decoder, grid, options.weights)

    return {name: loaded[choice] for name, (_, choice) in chosen.items()}


def with_draft(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """The samplers with their draft model and up-sampler, which are loaded only where needed.

    Raises:
        UserError: an option that no sampler of the run uses, or a draft model that is missing or does not fit.
    """
    _expect_used(planned, options)

    drafts = Drafts(source(options), options.draft, options.model, options.upscale_model)
    return [replace(p, beside=beside(p.entry, p.on, drafts)) for p in planned]


def _expect_used(planned: Sequence[Planned], options: argparse.Namespace) -> None:
    """Raise a UserError if an option was given that no sampler of the run uses: it would be ignored without a word."""
    given: dict[str, Any] = {}
    for name in ("draft", "upscale-model", "grid", "tar", "ta-tok", "encoder", "negative"):
        usual, _ = MODEL_OPTIONS.get(name, (None, ""))
        given[name] = getattr(options, name.replace("-", "_"), usual)

    entries = [p.entry for p in planned]
    reads = {p.on.condition for p in planned}
    loading.expect_used(given, entries, reads, "no sampler of this run uses", [p.on.kind.one_grid for p in planned])


def is_settings(variant: str) -> bool:
    """Whether the text after a sampler's colon holds settings, as in Any Sampler; otherwise it is a label."""
    return "=" in variant


def split_samplers(text: str) -> list[str]:
    """The samplers of a text with commas between them, and between the settings of one.

    "mar, zipar: window=4, parallel=16" names two.
    """
    names: list[str] = []
    for part in text.split(","):
        name, equals, _ = part.partition("=")
        of_the_last = names and is_settings(names[-1].partition(":")[2])
        if equals and ":" not in name and of_the_last:
            names[-1] += f",{part}"
        else:
            names.append(part)

    return names


def by_key(names: Iterable[str]) -> dict[str, Entry]:
    """Samplers by name, or by name and variant: a label ("mar:disa") or settings ("zipar:window=4,parallel=16").

    Raises:
        UserError: no name, an unknown sampler, or settings that it does not have.
    """
    out: dict[str, Entry] = {}

    for name in names:
        if not name.strip():
            continue

        kind, colon, variant = name.strip().partition(":")
        entry = find(kind)
        if is_settings(variant):
            values = _checked_settings(entry, variant)
            variant = ",".join(f"{name}={value}" for name, value in values.items())
        else:
            variant = variant.lower()
        out[f"{entry.name}{colon}{variant}"] = entry

    if not out:
        raise UserError("samplers: the list is empty; name at least one sampler, for example mar.")

    return out


def _checked_settings(entry: Entry, variant: str) -> dict[str, str]:
    """The settings after a sampler's colon. Raises UserError: those that it does not have."""
    values = parse_settings(variant, "samplers")
    try:
        choose(entry.name, values)
    except UserError as problem:
        raise UserError(f"samplers: {entry.name}: {problem}") from None

    return values


def settings_of(key: str) -> dict[str, str]:
    """The settings in a key of :func:`by_key`; none of a name alone or of a label."""
    variant = key.partition(":")[2]
    return parse_settings(variant, "samplers") if is_settings(variant) else {}


def assigned(
    entries: Mapping[str, Entry], values: Iterable[tuple[str, V]]
) -> dict[str, tuple[dict[str, V], dict[str, V]]]:
    """The values for each sampler, by its key of :func:`by_key`.

    They are those that were given for all samplers, as far as it has the setting, and those for it alone. Settings
    in the keys are not among them.

    Args:
        entries: the samplers.
        values: "name" or "sampler.name" with a value; later ones take precedence.

    Raises:
        UserError: a sampler that is not among the entries, an unknown setting, or one that the sampler's key has.
    """
    shared: dict[str, V] = {}
    own: dict[str, dict[str, V]] = {key: {} for key in entries}

    for text, value in values:
        sampler, dot, name = text.rpartition(".")
        if dot and sampler not in own:
            sampler = next(iter(by_key([sampler])))  # the parts of a combination may be in any order
            if sampler not in own:
                raise UserError(f"set: {sampler[:60]} is not a sampler of this run; choose one of {', '.join(own)}.")

        known = names_of_settings({sampler: entries[sampler]} if dot else dict(entries))
        concerned = [entries[sampler]] if dot else list(entries.values())
        if name not in known and not any([check_removed(entry.settings, name, value) for entry in concerned]):
            if all(name in entry.settings.refused for entry in concerned):
                raise unknown_setting_error(concerned[0].settings, name)
            whose = f"{sampler} has no" if dot else "no sampler of this run has a"
            hint = did_you_mean(name, known) or f"choose one of {', '.join(known)}."
            raise UserError(f"set: {whose} setting {name[:60]}; {hint}")

        if dot and name in settings_of(sampler):
            raise UserError(f"set: --samplers already sets {sampler}.{name}; leave one of the two out.")

        if dot:
            own[sampler][name] = value
        else:
            shared[name] = value

    out = {}
    for key, entry in entries.items():
        names = names_of_settings({key: entry})
        fitting = {name: value for name, value in shared.items() if name in names}
        out[key] = (fitting, own[key])

    return out


def plan(samplers: str, sets: Sequence[str], ready: Mapping[str, Ready]) -> list[Planned]:
    """Samplers with their settings, grouped by family, the baseline first in each.

    A later source of a setting takes precedence: the model's defaults, the preset (*balanced* unless another is asked
    for), settings for all samplers, settings for one sampler. A sampler with settings after its colon has the preset
    that they name or none, as in Any Sampler. Without a model in ``ready``, by sampler name, the settings are only
    checked.

    Raises:
        UserError: an unknown sampler or setting, or settings that its model cannot be sampled with.
    """
    entries = by_key(split_samplers(samplers))
    given = assigned(entries, [assignment(text, "set") for text in sets])

    planned = []
    for key, entry in entries.items():
        shared, own = given[key]
        in_key = settings_of(key)
        own = {**in_key, **own}
        asked = {**shared, **own}
        usual = presets.CUSTOM if in_key else presets.BALANCED  # of Any Sampler, and of the samplers' nodes
        preset = asked.pop(PRESET, usual)  # plain samplers have no presets

        on = ready.get(entry.name)
        facts = on.facts if on else ModelFacts(demo=True)
        settings = facts.settings(entry.settings, preset, asked)

        if on:
            entry.check(on.model, settings)

        variant = key.partition(":")[2]
        planned.append(Planned(entry, settings, own, variant, on))

    return _by_family(planned)


def _by_family(planned: Sequence[Planned]) -> list[Planned]:
    """The samplers family after family in the order of their first samplers, the baseline first in each."""

    def family(p: Planned) -> str:
        return p.ready.family if p.ready else p.entry.family.name

    order = list(dict.fromkeys(family(p) for p in planned))

    def place(p: Planned) -> tuple[int, bool]:
        is_baseline = p.entry.baseline and not p.variant
        return order.index(family(p)), not is_baseline

    return sorted(planned, key=place)


def measured_against(planned: Sequence[Planned]) -> list[int | None]:
    """For each sampler the index of the one its speed-up is relative to, see :func:`runs.baseline.baselines`; None
    where there is none but itself.

    Models of two families or sizes have different networks, so the ratio of their seconds is not a property of a
    method.
    """
    runs = []
    for p in planned:
        network = (p.on.family, p.on.tokens)
        side = math.isqrt(p.on.tokens)
        runs.append(ComparedRun(network, p.entry.name, asdict(p.settings), side))

    return compared(baselines(runs))
