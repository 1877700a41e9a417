"""What a sweep asks for: a TOML or JSON file with models, samplers and lists of settings.

model = "demo"
samplers = ["mar", "fasthybrid"]          # as --samplers: combinations with a plus, a label or settings after a colon
images = 2000                             # of every cell
[set]
cfg = 2                                   # of every sampler that has it
"fasthybrid.threshold" = [0.9, 0.99]      # a list makes a grid
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ...cli.models import choose_models
from ...cli.planning import PROMPT, assigned, by_key, settings_of, split_samplers, variant_words
from ...errors import UserError, first_line
from ...model_loaders.kinds import ALL_DTYPES
from ...reports.files import typed_path
from ...runs.loading import AUTO, DEMO, Source
from ...samplers.settings import make
from ...samplers.tokens.mulosd.upsampling import BICUBIC
from ...samplers.tokens.settings import TarPromptSettings
from ...sweeps.plan import CHECKPOINT, LABEL, MOST_CELLS, SUBJECTS, Combination, combinations
from .records import MOST_BATCH, MOST_IMAGES

MOST_VALUES = 256  # of a setting
MOST_PROMPTS = 100_000
_MOST_BYTES = 8 << 20  # of a file
# Entries of a prompt beside its text: its name in DPG-Bench; its style in HPSv2, and its number within the style.
DPG = "dpg_bench"
HPS = "hpsv2_style"
NUMBER = "hpsv2_number"
# The files of HPSv2's four styles. DrawBench's prompts lie beside them and are scored by themselves.
_HPS_FILES = ("anime.json", "concept-art.json", "paintings.json", "photo.json")


@dataclass(frozen=True)
class Spec:
    """A sweep as asked.

    Image i of every cell uses the noise of (seed, i), and label or prompt i modulo their number.
    """

    model: str = DEMO  # a catalogue entry or a file
    samplers: tuple[str, ...] = ()  # registry names, each with an optional variant ("mar:disa", "zipar:window=4")
    # Values of "name", "sampler.name" or "prompt.name".
    set: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()  # class names or ids; all classes of the model if there are none
    prompts: tuple[Mapping[str, Any], ...] = ()  # objects with an entry "prompt"
    # Values of subjects, see :data:`.sweeps.plan.SUBJECTS`: a cell has one of each.
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    images: int = 0  # of every cell
    batch: int = 50  # images of a shard, which are sampled at once
    seed: int = 0
    decoder: str = AUTO  # from here to grid as the options of the command line
    draft: str = AUTO
    upscale_model: str = BICUBIC
    tar: str = AUTO
    ta_tok: str = AUTO
    encoder: str = "flan-t5-xl"
    grid: int | None = None
    dtype: str = AUTO
    threads: int = 0  # of a worker on a CPU; 0 for the process's own number

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts."""
        return tuple(str(p[PROMPT]) for p in self.prompts)

    @property
    def prompt_settings(self) -> dict[str, str]:
        """Settings of Tar's language model."""
        found = {}
        for dotted, values in self.set.items():
            prefix, _, name = dotted.partition(".")
            if prefix == PROMPT:
                found[name] = str(values[0])

        return found


LIMITS = {
    "images": (0, MOST_IMAGES),
    "batch": (1, MOST_BATCH),
    "seed": (0, (1 << 64) - 1),
    "grid": (2, 128),
    "threads": (0, 1024),
}
_DTYPES = (AUTO, *ALL_DTYPES)
_NAMES = ("dtype", "model", "decoder", "draft", "upscale_model", "tar", "ta_tok", "encoder")


def read_spec(path: Path) -> Spec:
    """The spec in a TOML or JSON file, checked as far as possible without a model."""
    return from_table(read_table(path))


def read_table(path: Path) -> dict[str, Any]:
    """The entries of a TOML or JSON file, with the prompts of the file that it names."""
    data = _bytes(path, "spec")

    try:
        text = _decoded(data)
        table = json.loads(text) if path.suffix.lower() == ".json" else _toml(text)
        if not isinstance(table, dict):
            raise ValueError("it holds no table")
    except (ValueError, RecursionError) as e:
        raise UserError(f"spec: {path.name} cannot be parsed ({first_line(e)}).") from None

    if isinstance(table.get("prompts"), str):
        table["prompts"] = read_prompts(path.parent / typed_path(table["prompts"], "prompts"))

    return table


def _bytes(path: Path, name: str) -> bytes:
    """The content of a file of a bounded size; ``name`` is of the input, for messages."""
    why = f"it is not a file of at most {_MOST_BYTES >> 20} MB"

    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_bytes()
    except (OSError, ValueError) as e:
        why = first_line(e)[:200]

    raise UserError(f"{name}: {str(path)[:200]} cannot be read ({why}).")


def _decoded(data: bytes) -> str:
    """The text of a file in UTF-8, or in UTF-16 after a byte order mark, without the mark.

    Excel and editors on Windows write such a mark, and PowerShell writes UTF-16.
    """
    in_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if in_utf16 else "utf-8-sig")


def _toml(text: str) -> dict[str, Any]:
    """The table of a TOML text."""
    try:
        tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError("Python 3.10 reads no TOML; install tomli, or write JSON") from None

    return tomllib.loads(text)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Prompts from a text file with one a line, or from JSON Lines of objects with an entry "prompt", as GenEval's.

    Or from a folder: DPG-Bench's, of text files with a prompt each, or HPSv2's, of JSON files with a style's list each.
    """
    try:
        if path.is_dir():
            return _prompts_of_folder(path)

        lines = [line.strip() for line in _decoded(_bytes(path, "prompts")).splitlines() if line.strip()]
        if path.suffix.lower() in (".jsonl", ".json"):
            return [json.loads(line) for line in lines]
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"prompts: {path.name} cannot be parsed ({first_line(e)}).") from None

    return [{PROMPT: line} for line in lines]


def _prompts_of_folder(folder: Path) -> list[dict[str, Any]]:
    """Prompts of a benchmark, each with what its tool finds the image by: :data:`DPG`, or :data:`HPS` and a number.

    Raises:
        ValueError: a file is no JSON, or there is none.
    """
    texts = sorted(folder.glob("*.txt"))
    found: list[dict[str, Any]] = []
    for file in texts or [folder / name for name in _HPS_FILES if (folder / name).is_file()]:
        text = _decoded(_bytes(file, "prompts"))
        for number, prompt in enumerate([text.strip()] if texts else json.loads(text)):
            place = {DPG: file.stem} if texts else {HPS: file.stem, NUMBER: number}
            found.append({PROMPT: prompt, **place})

    if not found:
        raise ValueError(f"it holds neither text files, a prompt each, nor HPSv2's {', '.join(_HPS_FILES)}")
    return found


def from_table(table: Mapping[str, Any]) -> Spec:
    """A spec from the entries of a file, checked."""
    names = [f.name for f in fields(Spec)]
    for name in table:
        if name not in names:
            raise UserError(f"spec: it has no entry {name!r}; choose one of {', '.join(names)}.")

    spec = Spec(**{name: _value(name, value) for name, value in table.items()})
    if not spec.samplers:
        raise UserError('spec: samplers is empty; name at least one, for example samplers = ["mar", "fasthybrid"].')

    for axis, entry in ((LABEL, "labels"), (PROMPT, "prompts")):
        if axis in spec.axes and getattr(spec, entry):
            raise UserError(f"{entry}: {axis} is an axis, so that every cell has one of its own; leave {entry} out.")

    # Both raise an error for what is not possible.
    expand(spec)
    make(TarPromptSettings, spec.prompt_settings)

    return spec


def with_values(spec: Spec, **values: Any) -> Spec:
    """The spec with other values, those that are not None, checked as the file's."""
    return replace(spec, **{name: _value(name, value) for name, value in values.items() if value is not None})


def _value(name: str, value: Any) -> Any:
    """The value of an entry, checked."""
    if name in LIMITS:
        return _number(name, value)
    if name in _NAMES:
        return _name(name, value)
    if name == "set":
        return _settings(value)
    if name == "axes":
        return _axes(value)
    if name == "prompts":
        return _prompts(value)

    return _list_of_names(name, value)


def _expect(fits: bool, name: str, value: Any, give: str) -> None:
    """Raise a UserError unless the value of an entry fits; ``give`` is what does."""
    if not fits:
        raise UserError(f"spec: {name} is {str(value)[:60]!r}; give {give}.")


def _number(name: str, value: Any) -> int:
    """The value of an entry that is a whole number."""
    low, high = LIMITS[name]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _expect(is_whole and low <= value <= high, name, value, f"a whole number from {low} to {high}")
    return int(value)


def _name(name: str, value: Any) -> str:
    """The value of an entry that is a name."""
    _expect(isinstance(value, str) and bool(value), name, value, "a name")
    _expect(name != "dtype" or value in _DTYPES, name, value, f"one of {', '.join(_DTYPES)}")
    return str(value)


def _list_of_names(name: str, value: Any) -> tuple[str, ...]:
    """The value of an entry that is a list of names, or a text with commas between them."""
    words = value
    if isinstance(value, str):
        parts = split_samplers(value) if name == "samplers" else value.split(",")
        words = [word.strip() for word in parts]

    right = isinstance(words, Sequence) and all(
        isinstance(word, str | int) and not isinstance(word, bool) for word in words
    )
    _expect(right, name, value, "a list of names")

    return tuple(str(word) for word in words if str(word))


def _settings(table: Any) -> dict[str, tuple[Any, ...]]:
    """Settings by dotted name; nested tables, which TOML makes of unquoted dotted names, are flattened."""
    _expect(isinstance(table, Mapping), "set", table, "a table of lines such as cfg = 2")

    out: dict[str, tuple[Any, ...]] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            for inner, values in _settings(value).items():
                out[f"{name}.{inner}"] = values
        else:
            out[str(name)] = _values(name, value)

    return out


def _axes(table: Any) -> dict[str, tuple[str, ...]]:
    """Axes that are no settings, by name."""
    _expect(isinstance(table, Mapping), "axes", table, 'a table of lines such as label = ["cat", "dog"]')

    out: dict[str, tuple[str, ...]] = {}
    for name, value in table.items():
        if name not in SUBJECTS:
            raise UserError(
                f"axes: there is no axis {str(name)[:60]!r}; it is one of {', '.join(SUBJECTS)}. Settings and presets "
                "belong to [set]."
            )
        out[name] = tuple(map(str, _values(name, list(value) if isinstance(value, tuple) else value, "axes")))

    if LABEL in out and PROMPT in out:
        raise UserError("axes: label and prompt are both axes, and a model reads one of them; leave the other out.")
    return out


def _values(name: str, value: Any, table: str = "set") -> tuple[Any, ...]:
    """The values of a setting or an axis, one or a list."""
    listed = value if isinstance(value, list) else [value]
    fits = 0 < len(listed) <= MOST_VALUES and all(isinstance(one, (str, int, float)) for one in listed)
    _expect(fits, f"{table}: {name}", value, f"1 to {MOST_VALUES} numbers, words, or true and false")
    return tuple(dict.fromkeys(listed))


def _prompts(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Prompts as objects, from texts or objects."""
    _expect(isinstance(value, list) and 0 < len(value) <= MOST_PROMPTS, "prompts", value, f"1 to {MOST_PROMPTS} texts")
    found = [{PROMPT: entry} if isinstance(entry, str) else entry for entry in value]

    for i, entry in enumerate(found, 1):
        text = entry.get(PROMPT) if isinstance(entry, Mapping) else None
        is_text = isinstance(text, str) and bool(text.strip())
        _expect(is_text, f"prompts: entry {i}", entry, f'a text, or an object with an entry "{PROMPT}"')

    return tuple(found)


def expand(spec: Spec) -> list[Combination]:
    """All combinations of a spec, in the order of its samplers."""
    entries = by_key(spec.samplers)

    # Settings of the prompts are those of all cells, the others make the grid.
    of_samplers = []
    for name, values in spec.set.items():
        if name.partition(".")[0] != PROMPT:
            of_samplers.append((name, values))
        elif len(values) > 1:
            raise UserError(f"set: {name} lists {len(values)} values; all cells draw the same prompts, so give one.")

    given = assigned(entries, of_samplers)

    out: list[Combination] = []
    for key, entry in entries.items():
        shared, own = given[key]
        in_key = {name: (value,) for name, value in settings_of(key).items()}
        grid = {**spec.axes, **shared, **in_key, **own}
        if len(out) + math.prod(map(len, grid.values())) > MOST_CELLS:
            raise UserError(f"set: the grid has more than {MOST_CELLS} cells; give fewer values.")

        try:
            out += combinations(entry, grid, variant=variant_words(key))
        except UserError as e:
            raise UserError(f"set: {entry.name}.{e}") from None

    return out


def models_of(spec: Spec, planned: Sequence[Combination], files: Source) -> list[tuple[str, str]]:
    """Family and choice of the model of every combination, as :func:`.cli.models.choose_models`."""
    entries = list(dict.fromkeys(combination.choice.entry for combination in planned))
    prompted = bool(spec.prompts) or PROMPT in spec.axes
    labelled = bool(spec.labels) or LABEL in spec.axes

    chosen: dict[str, dict[str, tuple[str, str]]] = {}
    out: list[tuple[str, str]] = []
    for combination in planned:
        model = str(combination.asked.get(CHECKPOINT, spec.model))
        if model not in chosen:
            chosen[model] = choose_models(model, entries, files, prompted, labelled)
        out.append(chosen[model][combination.choice.entry.name])

    return out
