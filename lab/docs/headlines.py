"""Write the summary tables of README and docs/benchmarks.md from the tables in docs/tables.md.

``figures`` does this after every figure, so the three pages agree. A row of a summary names the figure and the row that
it is taken from; after a change of these names, the rows below follow.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ...reports.table import markdown
from .blocks import markers, with_block

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs" / "tables.md"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"

PASSES = "passes"
HEAD_CALLS = "head calls"
SCENE = "scene, %"
PROMPT = "prompt, %"

IDENTICAL = "identical"
CLOSE = "mostly small changes"
SAME_DISTRIBUTION = "same distribution"
DIFFERENT = "different"
# Plain MAR with fewer steps, beside the methods that also have fewer.
FEWER_DIFFUSION_STEPS = "Fewer diffusion steps, no other change"
FEW_STEPS = "Few steps (as LazyMAR, fast, but without caches)"


@dataclass(frozen=True)
class Headline:
    """A method at one setting, measured against the unaccelerated sampler."""

    method: str
    model: str
    image: str
    figure: str
    row: str  # first cell of its row
    plain: str  # first cell of the unaccelerated sampler's row
    work: str = HEAD_CALLS
    right: str = SCENE
    # Row and column of the speed-up for one image and for a batch; () if the figure has no seconds.
    speeds: tuple[tuple[str, str], ...] | None = None
    many: int = 50  # images of the batch
    counted: int = 1  # images of the batch whose work is counted


EVERY = (
    Headline("Parallel decoding", "LlamaGen", IDENTICAL, "llamagen", "LlamaGen, parallel", "LlamaGen", PASSES),
    Headline(
        "Parallel decoding",
        "Tar",
        IDENTICAL,
        "tar",
        "Tar, parallel (demo-dtok)",
        "Tar (demo-dtok)",
        PASSES,
        PROMPT,
        many=47,
    ),
    Headline("ZipAR, window 8", "LlamaGen", DIFFERENT, "llamagen", "ZipAR, window 8", "LlamaGen", PASSES),
    Headline(
        "MuLo-SD, balanced",
        "LlamaGen",
        DIFFERENT,
        "mulosd",
        "MuLo-SD, tau 0.1 (demo-llamagen)",
        "LlamaGen (demo-llamagen)",
        PASSES,
    ),
    Headline(
        "MuLo-SD, fast",
        "LlamaGen",
        DIFFERENT,
        "mulosd",
        "MuLo-SD, fast (demo-llamagen)",
        "LlamaGen (demo-llamagen)",
        PASSES,
    ),
    Headline(
        "PAR",
        "PAR",
        DIFFERENT,
        "par",
        "PAR (demo-par)",
        "LlamaGen (demo-llamagen-low)",
        PASSES,
        speeds=(("1 | PAR", "speed-up"), ("8 | PAR", "speed-up")),
        many=8,
        counted=50,
    ),
    Headline("FastHybrid, balanced", "MAR", CLOSE, "fasthybrid_control", "FastHybrid, balanced", "MAR"),
    Headline(FEWER_DIFFUSION_STEPS, "MAR", DIFFERENT, "fasthybrid_control", "MAR, 17 diffusion steps", "MAR"),
    Headline("LazyMAR, balanced", "MAR", CLOSE, "mar", "LazyMAR, balanced", "MAR"),
    Headline("LazyMAR, fast", "MAR", DIFFERENT, "mar", "LazyMAR, fast", "MAR"),
    Headline(FEW_STEPS, "MAR", DIFFERENT, "mar", "MAR, few steps", "MAR"),
    Headline("GtR, balanced", "MAR", DIFFERENT, "gtr", "GtR, balanced", "MAR", speeds=(), counted=50),
    Headline("DiSA", "MAR", CLOSE, "mar", "MAR, disa", "MAR"),
    Headline("Speculation", "MAR", SAME_DISTRIBUTION, "mar", "MAR, speculation", "MAR"),
    Headline("CSpD, balanced", "MAR", CLOSE, "mar", "CSpD, balanced", "MAR"),
    Headline("DiSA", "BitDance", CLOSE, "bitdance", "BitDance, disa", "BitDance"),
    Headline("Speculation", "BitDance", SAME_DISTRIBUTION, "bitdance", "BitDance, speculation", "BitDance"),
)
# What README shows: what a reader accepts, and the method in words.
SHOWN = {
    ("Parallel decoding", "LlamaGen"): ("no change at all", "LlamaGen with parallel decoding"),
    ("FastHybrid, balanced", "MAR"): ("mostly small changes", "MAR with FastHybrid, preset *balanced*"),
    (FEWER_DIFFUSION_STEPS, "MAR"): ("a different image", "MAR with fewer diffusion steps, no other change"),
    (FEW_STEPS, "MAR"): (
        "a different image",
        "MAR with preset *few steps*: the steps and token order of LazyMAR *fast*, but no caches",
    ),
    ("LazyMAR, fast", "MAR"): ("a different image", "MAR with LazyMAR, preset *fast*"),
}


class Tables:
    """The tables of a page, by figure."""

    def __init__(self, text: str):
        self.text = text

    def rows(self, figure: str) -> list[dict[str, str]]:
        """The rows of a figure's tables, each as column and cell."""
        begin, end = markers(figure)
        _, found, rest = self.text.partition(begin)
        if not found:
            raise UserError(
                f"headlines: docs/tables.md has no figure {figure}; correct the figure's name in headlines.py."
            )

        rows = []
        for table in re.findall(r"(?:^\|.*\n?)+", rest.partition(end)[0], re.M):
            head, _, *lines = [
                [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
            ]
            rows += [dict(zip(head, cells, strict=True)) for cells in lines]
        return rows

    def cell(self, figure: str, row: str, column: str) -> str:
        """A cell without its interval. ``row`` is the first cell of its row, or the first ones with " | " between."""
        for cells in self.rows(figure):
            if column in cells and " | ".join(cells.values()).startswith(f"{row} | "):
                return cells[column].partition(" (")[0]

        raise UserError(
            f"headlines: the figure {figure} has no row {row!r} with a column {column!r}; change the row or the "
            "column in headlines.py."
        )


def line(tables: Tables, headline: Headline) -> list[str]:
    """The cells of a headline in docs/benchmarks.md."""
    speeds = headline.speeds
    if speeds is None:
        speeds = tuple((headline.row, f"speed-up, batch {batch}") for batch in (1, headline.many))
    times = [tables.cell(headline.figure, row, column).removesuffix("x") for row, column in speeds] or ["", ""]
    if headline.many != 50:
        times[1] += f" (batch of {headline.many})"

    work = f"{headline.work}, batch {headline.counted}"
    before, after = (int(tables.cell(headline.figure, row, work)) for row in (headline.plain, headline.row))
    right, plain = (tables.cell(headline.figure, row, headline.right) for row in (headline.row, headline.plain))

    return [
        headline.method,
        headline.model,
        headline.image,
        *times,
        f"{headline.work}: {after:,} instead of {before:,}",
        right,
        plain,
    ]


def summary(tables: Tables) -> str:
    """The table of docs/benchmarks.md."""
    head = [
        "method",
        "demo model",
        "image",
        "times as fast, 1 image",
        "times as fast, batch of 50",
        "work for 1 image",
        "correct images, %",
        "correct without acceleration, %",
    ]
    return markdown([head, *(line(tables, headline) for headline in EVERY)])


def shown(tables: Tables) -> str:
    """The table of README."""
    rows = [["you accept", "example", "times as fast", "correct images, %", "correct without acceleration, %"]]
    for headline in EVERY:
        words = SHOWN.get((headline.method, headline.model))
        if words:
            _, _, _, speed, _, _, right, plain = line(tables, headline)
            rows.append([*words, f"{float(speed):.1f}", right, plain])
    return markdown(rows, markup=True)


PLACES: Mapping[str, tuple[Path, Callable[[Tables], str]]] = {
    "headlines": (README, shown),
    "summary": (BENCHMARKS, summary),
}


def pages() -> dict[Path, str]:
    """Every page with its summary, made from docs/tables.md as it is now."""
    tables = Tables(TABLES.read_text(encoding="utf-8-sig"))
    found = {}
    for name, (path, table) in PLACES.items():
        found[path] = with_block(path.read_text(encoding="utf-8-sig"), name, table(tables))
    return found


def write() -> None:
    """Write the summaries into their pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    write()
    return 0
