"""Time samplers against each other: the pack's command bench, also for official sizes with random weights."""

from __future__ import annotations

import argparse

from ...cli import bench
from .random_options import planned_for, random_option


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    bench.arguments(parser)
    random_option(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return bench.run(options, planned_for)
