"""Find the fastest sampler on this machine whose images stay close enough to the plain sampler's.

The plain sampler and every accelerator that suits the model run one after another on the same seeds, for several
rounds. The answer is printed as a line for the node Any Sampler and as options for compare and bench. After the first
round, only candidates that can still win are run again.
"""

from __future__ import annotations

import argparse

import numpy as np

from ..reports.record import Report
from ..runs import presets
from ..runs.advice import calibrate, candidates
from ..runs.choice import PRESET, Choice, choose
from ..runs.drawing import decode
from ..runs.limits import MOST_IMAGES, SEEDS
from ..runs.loading import AUTO, DEMO
from ..runs.measured import AdviceSettings
from ..runs.registry import find
from ..samplers.engine import finish
from ..samplers.settings import knobs, settings_from
from .conditions import conditions
from .options import condition_options, model_options, whole
from .planning import Planned, load, usual_samplers, with_draft
from .running import draw, warm_up


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    for name, (default, about) in knobs(AdviceSettings).items():
        option = name.replace("_", "-")
        choices = list(about.choices) or None
        help = f"{about.help} Default {default}."
        parser.add_argument(f"--{option}", default=str(default), choices=choices, help=help)
    condition_options(parser, "seed of the first round")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    settings = settings_from(AdviceSettings, {name: getattr(options, name) for name in knobs(AdviceSettings)})
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)
    options.samplers = None

    # The plain sampler first, then the candidates.
    usual = usual_samplers(options).split(",")[0]
    plain = choose(find(usual).name, {})
    drafted = options.draft != AUTO or options.model == DEMO
    choices = [plain, *candidates(plain.entry.name, drafted)]

    planned = _planned(choices, options)
    what = conditions(planned, options.label, options.text, batch, options, seed)
    planned = with_draft(planned, options)
    index_of = {id(choice): i for i, choice in enumerate(choices)}

    def make_images(choice: Choice, seed: int) -> tuple[np.ndarray, Report]:
        i = index_of[id(choice)]
        made = draw(planned[i], what[i], seed)
        return decode(planned[i].on, made).numpy(), made.report

    warm_up(planned[0], what[0])
    advice = finish(calibrate(plain, choices[1:], make_images, settings, seed))

    print(advice.table)
    best: Choice = advice.best
    print(f"\ntext for the node Any Sampler: {best.text}\noptions for compare and bench: {_options(plain, best)}")
    return 0


def _options(plain: Choice, best: Choice) -> str:
    """The plain sampler and a choice as options of compare and bench."""
    if best is plain:
        return f"--samplers {plain.entry.name}"

    # The plain sampler with other settings is a variant of it.
    name = best.entry.name
    if best.entry is plain.entry:
        name = f"{name}:advised"

    # Without a preset in the options a sampler that has presets would take its default one.
    values = dict(best.values)
    has_presets = bool(presets.values(best.entry.settings, presets.BALANCED, demo=True))
    if has_presets or best.preset != presets.CUSTOM:
        values = {PRESET: best.preset, **values}

    parts = [f"--samplers {plain.entry.name},{name}"]
    for setting, value in values.items():
        assigned = f"{name}.{setting}={value}"
        parts.append(f'--set "{assigned}"' if " " in assigned else f"--set {assigned}")

    return " ".join(parts)


def _planned(choices: list[Choice], options: argparse.Namespace) -> list[Planned]:
    """The choices with their models and settings."""
    ready = load(options, [choice.entry for choice in choices])

    planned = []
    for choice in choices:
        on = ready[choice.entry.name]
        settings = choice.settings(on.facts)
        planned.append(Planned(choice.entry, settings, {}, choice.text, on))

    return planned
