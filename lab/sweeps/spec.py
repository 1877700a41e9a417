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
from ...cli.planning import PROMPT, assigned, by_key, settings_of, split_samplers
from ...errors import UserError, first_line
from ...model_loaders.kinds import ALL_DTYPES
from ...reports.files import typed_path
from ...runs.loading import AUTO, DEMO, Source
from ...samplers.settings import settings_from
from ...samplers.tokens.tar import TarPromptSettings
from ...sweeps.plan import MOST_CELLS, Combination, combinations
from .records import MOST_BATCH, MOST_IMAGES

MOST_VALUES = 256  # of a setting
MOST_PROMPTS = 100_000
_MOST_BYTES = 8 << 20  # of a file


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
    prompts: tuple[str, ...] = ()
    images: int = 0  # of every cell
    batch: int = 50  # images of a shard, which are sampled at once
    seed: int = 0
    decoder: str = AUTO  # from here to dtype as the options of the command line
    draft: str = AUTO
    upscale_model: str = AUTO
    tar: str = AUTO
    dtype: str = AUTO
    threads: int = 0  # of a worker on a CPU; 0 for the process's own number

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
    "threads": (0, 1024),
}
_DTYPES = (AUTO, *ALL_DTYPES)
_NAMES = ("dtype", "model", "decoder", "draft", "upscale_model", "tar")


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
        raise UserError(f"spec: {path.name} cannot be parsed ({first_line(e)}); correct the file.") from None

    if isinstance(table.get("prompts"), str):
        table["prompts"] = read_prompts(path.parent / typed_path(table["prompts"], "prompts"))

    return table


def _bytes(path: Path, name: str) -> bytes:
    """The content of a file of a bounded size; ``name`` is of the input, for messages."""
    why = f"there is no such file, or it is larger than {_MOST_BYTES >> 20} MB"

    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_bytes()
    except (OSError, ValueError) as e:
        why = first_line(e)[:200]

    raise UserError(f"{name}: {str(path)[:200]} cannot be read ({why}); choose a different file.")


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
        raise ValueError("Python 3.10 cannot read TOML; install tomli, or write JSON") from None

    return tomllib.loads(text)


def read_prompts(path: Path) -> list[str]:
    """Prompts from a text file with one a line."""
    try:
        text = _decoded(_bytes(path, "prompts"))
    except ValueError as e:
        raise UserError(f"prompts: {path.name} is not UTF-8 text ({first_line(e)}); save it as UTF-8.") from None

    return [line.strip() for line in text.splitlines() if line.strip()]


def from_table(table: Mapping[str, Any]) -> Spec:
    """A spec from the entries of a file, checked."""
    names = [f.name for f in fields(Spec)]
    for name in table:
        if name not in names:
            raise UserError(f"spec: there is no entry {name!r}; choose one of {', '.join(names)}.")

    spec = Spec(**{name: _value(name, value) for name, value in table.items()})
    if not spec.samplers:
        raise UserError('spec: samplers is empty; name at least one, for example samplers = ["mar", "fasthybrid"].')

    # Both raise an error for what is not possible.
    expand(spec)
    settings_from(TarPromptSettings, spec.prompt_settings)

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


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """The values of a setting, one or a list."""
    listed = value if isinstance(value, list) else [value]
    fits = 0 < len(listed) <= MOST_VALUES and all(isinstance(one, (str, int, float)) for one in listed)
    _expect(fits, f"set: {name}", value, f"1 to {MOST_VALUES} numbers, words, or true and false")
    return tuple(dict.fromkeys(listed))


def _prompts(value: Any) -> tuple[str, ...]:
    """Prompts, checked."""
    _expect(isinstance(value, list) and 0 < len(value) <= MOST_PROMPTS, "prompts", value, f"1 to {MOST_PROMPTS} texts")
    for i, text in enumerate(value, 1):
        _expect(isinstance(text, str) and bool(text.strip()), f"prompts: entry {i}", text, "a text")

    return tuple(value)


def variant_words(key: str) -> str:
    """The variant of a key of :func:`by_key` in words: its label, or its settings as "window 4, parallel 16"."""
    settings = settings_of(key)
    if not settings:
        return key.partition(":")[2]

    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def expand(spec: Spec) -> list[Combination]:
    """All combinations of a spec, in the order of its samplers."""
    entries = by_key(spec.samplers)

    # Settings of the prompts are those of all cells, the others make the grid.
    of_samplers = []
    for name, values in spec.set.items():
        if name.partition(".")[0] != PROMPT:
            of_samplers.append((name, values))
        elif len(values) > 1:
            raise UserError(
                f"set: {name} lists {len(values)} values, but a setting of the prompts has one value for all cells; "
                "give one value."
            )

    given = assigned(entries, of_samplers)

    out: list[Combination] = []
    for key, entry in entries.items():
        shared, own = given[key]
        in_key = {name: (value,) for name, value in settings_of(key).items()}
        grid = {**shared, **in_key, **own}
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
    chosen = choose_models(spec.model, entries, files, bool(spec.prompts), bool(spec.labels))

    return [chosen[combination.choice.entry.name] for combination in planned]
