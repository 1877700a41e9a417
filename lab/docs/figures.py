"""Make the tables and plots of the docs.

``docs/benchmarks/figures.toml`` lists them with their commands. Without names all are made. Each command runs in a
process of its own with one thread, and the result goes into the page, between the markers of the figure. Finished
figures are kept in ``build/figures``, under a digest of their commands, files and code: the same call continues after
an interruption, and makes only those figures again that a change affects.

Seconds are measured: run it on an otherwise idle machine.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...runs.registry import find
from ...samplers.settings import knobs
from ..commands import MODULE
from ..commands import main as command_line
from ..sweeps.spec import Spec, from_table, read_spec, read_table
from . import headlines
from .blocks import with_block

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "benchmarks" / "figures.toml"
# Where finished steps are kept. Not tracked.
KEPT = ROOT / "build" / "figures"
# First part of a path in a command that is the folder of a figure.
OF_FIGURES = "figures/"
# Commands whose output is not for the page. The others print the tables of a figure.
_PREPARE = ("sweep", "evaluate", "plot")
# The code that images, seconds and measures depend on, and the weights.
CODE = (
    "demo",
    "memory.py",
    "model_loaders",
    "networks",
    "runs",
    "samplers",
    "lab/checkpoints",
    "lab/experiments",
    "lab/sweeps",
    "lab/training",
    "lab/work",
)
_CODE_FILES = (".json", ".py", ".safetensors", ".txt")


@dataclass(frozen=True)
class Listed:
    """A table or a plot of the docs."""

    name: str
    page: str  # path of the page
    commands: tuple[str, ...]
    minutes: float  # an estimate
    image: str = ""  # path of a plot, "" for a table
    about: str = ""  # text in place of the plot

    @property
    def specs(self) -> list[Spec]:
        """The specs of its sweeps."""
        found = []
        for command in self.commands:
            words = shlex.split(command)
            if words[0] == "sweep":
                found.append(read_spec(ROOT / words[1]))

        return found


def listed(path: Path = LIST) -> dict[str, Listed]:
    """The figures by name, in the order in which they are made."""
    table = read_table(path)
    page = table.pop("page")

    found = {}
    for name, about in table.items():
        own = {"page": page, **about, "commands": tuple(about["commands"])}
        found[name] = Listed(name, **own)

    return found


# ------------------------------------------------------------------------------------------------------ what is kept


def code_digest() -> str:
    """Digest of the code and the weights that figures depend on, 64 hexadecimal digits."""
    state = hashlib.sha256()
    for name in CODE:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix in _CODE_FILES:
                state.update(file.relative_to(ROOT).as_posix().encode())
                state.update(hashlib.sha256(file.read_bytes()).digest())

    return state.hexdigest()


def needed(figure: Listed, every: Mapping[str, Listed]) -> list[str]:
    """Names of the other figures whose folders a figure's commands read."""
    found = []
    for command in figure.commands:
        for word in shlex.split(command):
            if word.startswith(OF_FIGURES):
                name = word.split("/")[1]
                if name not in every:
                    raise UserError(
                        f"figures: {figure.name} reads the folder of {name}, but {name} is not in the list of figures."
                    )
                if name != figure.name and name not in found:
                    found.append(name)

    return found


def key(figure: Listed, every: Mapping[str, Listed], code: str) -> str:
    """What the folder of a figure is called: its name, and a digest of all that it depends on."""
    state = hashlib.sha256(code.encode())
    for command in figure.commands:
        state.update(command.encode())
        for word in shlex.split(command):
            # A list of models may be longer than the name of a file can be.
            if "/" in word and (ROOT / word).is_file():
                state.update((ROOT / word).read_bytes())
    for spec in figure.specs:
        state.update(repr(spec).encode())  # with the prompts of the file that it names
    for name in needed(figure, every):
        state.update(key(every[name], every, code).encode())

    return f"{figure.name}-{state.hexdigest()[:12]}"


class Maker:
    """Runs the commands of figures, and keeps what they made."""

    def __init__(self, every: Mapping[str, Listed], kept: Path = KEPT):
        self.every = every
        self.kept = kept
        self._code = code_digest()

    def folder(self, name: str) -> Path:
        """The folder of a figure."""
        return self.kept / key(self.every[name], self.every, self._code)

    def finished(self, name: str) -> bool:
        """Whether all steps of a figure are finished."""
        return (self.folder(name) / "made.json").is_file()

    def make(self, name: str) -> None:
        """Run what is not finished of a figure, after the figures that it needs."""
        figure = self.every[name]
        for other in needed(figure, self.every):
            self.make(other)
        if self.finished(name):
            return

        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        for number, command in enumerate(figure.commands, 1):
            output = folder / f"step-{number}.txt"
            if not output.is_file():
                print(f"{name}: {command}", flush=True)
                _replace(output, _printed(self.words(command)))

        _replace(folder / "made.json", json.dumps(machine()))

    def words(self, command: str) -> list[str]:
        """The words of a command with the folders that are meant."""
        words = []
        for word in shlex.split(command):
            if word.startswith(OF_FIGURES):
                name, _, rest = word.removeprefix(OF_FIGURES).partition("/")
                word = str(self.folder(name) / rest)
            words.append(word)

        return words

    def block(self, name: str) -> str:
        """What stands between the markers of a finished figure."""
        figure = self.every[name]
        folder = self.folder(name)
        made = json.loads((folder / "made.json").read_text(encoding="utf-8-sig"))

        if figure.image:
            shown = f"![{figure.about}]({_relative(figure.image, figure.page)})"
        else:
            outputs = []
            for number, command in enumerate(figure.commands, 1):
                if command.split()[0] not in _PREPARE:
                    outputs.append((folder / f"step-{number}.txt").read_text(encoding="utf-8-sig"))
            shown = joined(outputs)

        return f"{shown}\n\n{conditions(figure, made)}"

    def write(self, name: str) -> None:
        """Write a finished figure into its page, and its plot beside it."""
        figure = self.every[name]
        if figure.image:
            source = self.folder(name) / Path(figure.image).name
            (ROOT / figure.image).write_bytes(source.read_bytes())

        page = ROOT / figure.page
        text = page.read_text(encoding="utf-8-sig")
        page.write_text(with_block(text, name, self.block(name)), encoding="utf-8")


def _printed(words: Sequence[str]) -> str:
    """What a command of the command line prints, in a process of its own with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "fastar_nodes.lab", *words], env=environment, stdout=subprocess.PIPE)
    if done.returncode:
        raise UserError(
            f"figures: {shlex.join(words)} ended with the exit code {done.returncode}; its output above says why."
        )

    return done.stdout.decode()


def _replace(path: Path, text: str) -> None:
    """Write a file that exists whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


# ---------------------------------------------------------------------------------------------------------- the page


def joined(outputs: Sequence[str]) -> str:
    """The Markdown tables in the outputs of commands, the rows of those with the same columns in one table."""
    # Rows by the head and the rule below it.
    tables: dict[tuple[str, ...], list[str]] = {}
    for output in outputs:
        for table in re.findall(r"(?:^\|.*\n?)+", output, re.M):
            head, rule, *rows = table.splitlines()
            cells = tuple(cell.strip() for cell in head.split("|"))
            own = tables.setdefault(cells, [head, rule])
            own += rows

    if not tables:
        raise UserError("figures: the commands printed no table.")
    return "\n\n".join("\n".join(lines) for lines in tables.values())


def conditions(figure: Listed, made: Mapping[str, str]) -> str:
    """The line below a figure: its command, seed and number of images, machine, version and date."""
    parts = [f"`make figures ONLY={figure.name}`"]
    images = []
    seeds = set()
    for command in figure.commands:
        words = shlex.split(command)
        if words[0] == "sweep":
            spec = read_spec(ROOT / words[1])
            images.append(int(_option(words, "--images") or spec.images))
            seeds.add(_option(words, "--seed") or str(spec.seed))

    if images:
        parts.append(f"seed {', '.join(sorted(seeds))}, {max(images)} images a cell")

    parts.append("{cpu}, PyTorch {torch}, {date}".format_map(made))
    return f"*{'; '.join(parts)}.*"


def _option(words: Sequence[str], name: str) -> str:
    """The value after an option of a command, "" without it."""
    return words[words.index(name) + 1] if name in words else ""


def machine() -> dict[str, str]:
    """Processor, version of PyTorch, and the day. A rented machine hides the name of its processor, not its numbers."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", about, re.M))
        if len(facts) == 3:
            cpu = "{model name} (family {cpu family}, model {model})".format_map(facts)

    return {"cpu": cpu, "torch": torch.__version__.partition("+")[0], "date": date.today().isoformat()}


def _relative(path: str, page: str) -> str:
    """A path of the repository as a link in a page."""
    return Path(os.path.relpath(path, Path(page).parent)).as_posix()


# ----------------------------------------------------------------------------------------------------- tiny settings

TINY_IMAGES = 2
# The full-size model whose presets are counted fastest.
_TINY_MODEL = "llamagen-b-256"
_TINY_PUBLISHED = "par-xxl-4x"
_TINY_SETTINGS = {"steps": 6, "diffusion_steps": 5}


def tiny(figures: Sequence[Listed], folder: Path) -> Iterator[tuple[str, int]]:
    """Run every command of figures on few images with few steps, in this process; nothing is written into a page.

    Yields each command as it was run with its exit code.
    """
    for figure in figures:
        for command in figure.commands:
            words = _tiny_words(shlex.split(command), folder)
            with contextlib.redirect_stdout(io.StringIO()):
                code = command_line(words)
            yield shlex.join(words), code


def _tiny_words(words: Sequence[str], folder: Path) -> list[str]:
    """A command on tiny settings, with its folders below ``folder``."""
    out = [str(folder / word) if word.startswith(OF_FIGURES) else word for word in words]

    if out[0] == "sweep":
        spec = folder / f"{Path(out[1]).stem}.json"
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_text(json.dumps(_tiny_spec(ROOT / out[1])), encoding="utf-8")
        out[1] = str(spec)
        out += ["--images", str(TINY_IMAGES), "--device", "cpu"]
    elif out[0] == "evaluate":
        out += ["--resamples", "10"]
    elif out[0] == "bench":
        out += ["--repeats", "1", "--batch", "1"]
    elif out[0] == "presets":
        out[out.index("--models") + 1] = _TINY_MODEL
    elif out[0] == "published":
        out += ["--models", _TINY_PUBLISHED]

    return out


def _tiny_spec(path: Path) -> dict[str, Any]:
    """The entries of a spec with few steps, where its samplers have them."""
    table = read_table(path)
    spec = from_table(table)

    names = set()
    for sampler in spec.samplers:
        names.update(knobs(find(sampler.partition(":")[0]).settings))

    few = {name: value for name, value in _TINY_SETTINGS.items() if name in names}
    return {**table, "batch": TINY_IMAGES, "set": {**table.get("set", {}), **few}}


# -------------------------------------------------------------------------------------------------------- the command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; default all")
    parser.add_argument("--dry-run", action="store_true", help="print commands and minutes; run nothing")
    parser.add_argument("--tiny", metavar="DIR", help="run all commands on tiny settings in this folder; write no page")


def run(options: argparse.Namespace) -> int:
    """Make figures; returns the exit code."""
    every = listed()
    names = [name for text in options.names for name in text.split(",") if name] or list(every)
    for name in names:
        if name not in every:
            raise UserError(f"figures: there is no figure {name!r}; choose one of {', '.join(every)}.")

    if options.tiny:
        codes = []
        for command, code in tiny([every[name] for name in names], Path(options.tiny)):
            print(f"{code}  {command}", flush=True)
            codes.append(code)
        return int(any(codes))

    maker = Maker(every)
    if options.dry_run:
        _plan(maker, names)
        return 0

    for name in names:
        maker.make(name)
        maker.write(name)

    headlines.write()
    return 0


def _plan(maker: Maker, names: Sequence[str]) -> None:
    """Print what would run."""
    minutes = 0.0
    for name in names:
        figure = maker.every[name]
        if maker.finished(name):
            print(f"{name}: finished")
            continue

        print(f"{name}: about {figure.minutes:g} minutes")
        for command in figure.commands:
            print(f"  {MODULE} {command}")
        minutes += figure.minutes

    print(f"about {minutes:g} minutes in all")
