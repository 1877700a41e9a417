"""The option --random: models of the official sizes with random weights, in place of those that --model names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...cli import bench
from ...cli.planning import Planned, prepare
from ...networks.speed import choose
from ...runs.loading import Ready, choose_device
from ...runs.registry import FAMILIES, Entry
from .sizes import family_of, random_models


def random_option(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--random",
        metavar="SIZE",
        help="an official size (MAR-B, LlamaGen-XL, ...) with random weights: its seconds are meaningful, its "
        "acceptance is not",
    )


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, samplers and prompts that bench has, and --random."""
    bench.shared_options(parser)
    random_option(parser)


def planned_for(options: argparse.Namespace) -> tuple[list[Planned], dict[str, str]]:
    """See :func:`cli.planning.prepare`; with --random the models have random weights."""
    if not options.random:
        return prepare(options)

    if options.samplers is None:
        options.samplers = ",".join(FAMILIES[family_of(options.random)].usual_samplers)
    return prepare(options, _random)


def _random(options: argparse.Namespace, entries: Sequence[Entry]) -> dict[str, Ready]:
    """Models of an official size with random weights, by sampler name."""
    ready = random_models(options.random, entries, options.dtype, choose_device(options.device))
    for made in ready.values():
        choose(made.model.net, options.speed, made.device)

    return ready
