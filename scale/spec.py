"""What a sweep asks for: a TOML or JSON file with models, samplers and lists of settings.

model = "demo"                            # or a list
samplers = ["mar", "fasthybrid"]          # as --samplers: combinations with a plus, variants after a colon
images = 2000                             # of every cell
[set]
cfg = 2                                   # of every sampler that has it
"fasthybrid.threshold" = [0.9, 0.99]      # a list makes a grid
"""

from __future__ import annotations

import difflib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..assembly import AUTO
from ..errors import UserError, first_line
from ..model_loaders.checkpoint import DTYPES, INT8
from ..samplers.choice import PRESET, Choice, choose
from ..samplers.registry import Entry, find
from ..samplers.settings import knobs, make
from ..samplers.tokens.settings import TarPromptSettings

MOST_CELLS, MOST_VALUES, MOST_IMAGES, MOST_BATCH = 1024, 256, 10_000_000, 4096
MOST_PROMPTS, _MOST_BYTES = 100_000, 64 << 20
SEEDS = 1 << 64
# Prefix of the settings of Tar's language model.
PROMPT = "prompt"


@dataclass(frozen=True)
class Spec:
    """A sweep as asked.

    Attributes:
        model: "demo", catalogue entries or files.
        samplers: registry names, each with an optional variant ("mar:disa").
        set: setting to its values; "name" for all samplers, "sampler.name" for one, "prompt.name" for Tar's language model.
        labels: class names or ids, image i takes entry i modulo their number; () for all classes of the model.
        prompts: objects with an entry "prompt", taken in the same way.
        images: per cell.
        batch: images of a shard, which are sampled at once.
        seed: of the noise; image i uses (seed, i).
        decoder, draft, tar, ta_tok, encoder, grid: as the options of the command line.
        dtype: "auto", "fp32", "bf16", "fp16" or "int8".
        threads: of a worker on a CPU, 0 for the process's own number.
    """

    model: tuple[str, ...] = ("demo",)
    samplers: tuple[str, ...] = ()
    set: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    prompts: tuple[Mapping[str, Any], ...] = ()
    images: int = 0
    batch: int = 50
    seed: int = 0
    decoder: str = AUTO
    draft: str = AUTO
    tar: str = AUTO
    ta_tok: str = AUTO
    encoder: str = "flan-t5-xl"
    grid: int | None = None
    dtype: str = AUTO
    threads: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts."""
        return tuple(str(p[PROMPT]) for p in self.prompts)

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """Settings of Tar's language model."""
        return {k.partition(".")[2]: str(v[0]) for k, v in self.set.items() if k.partition(".")[0] == PROMPT}


@dataclass(frozen=True)
class Combination:
    """A sampler with one value of every setting.

    Attributes:
        choice: sampler, preset and values.
        asked: the values by name, the preset among them.
        title: name in tables and plots.
    """

    choice: Choice
    asked: Mapping[str, Any]
    title: str


# ------------------------------------------------------------------------------------------------ reading

_RANGES = {
    "images": (0, MOST_IMAGES),
    "batch": (1, MOST_BATCH),
    "seed": (0, SEEDS - 1),
    "grid": (2, 128),
    "threads": (0, 1024),
}
_CHOICES = {"dtype": (AUTO, *DTYPES, INT8)}
_NAMES = ("decoder", "draft", "tar", "ta_tok", "encoder")


def read_spec(path: Path) -> Spec:
    """The spec in a TOML or JSON file, checked as far as possible without a model.

    Raises:
        UserError: the file is missing, cannot be parsed, or asks for something that does not exist.
    """
    table = _parse(path)
    prompts = table.get("prompts")
    if isinstance(prompts, str):
        table["prompts"] = read_prompts(path.parent / prompts)
    return from_table(table)


def _bytes(path: Path, name: str) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{name}: {path} has more than {_MOST_BYTES >> 20} MiB; name a spec or a list of prompts.")
        return path.read_bytes()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)
        raise UserError(f"{name}: {path} cannot be read ({why}).") from None


def _parse(path: Path) -> dict[str, Any]:
    data = _bytes(path, "spec")
    try:
        text = data.decode()
        found = json.loads(text) if path.suffix.lower() == ".json" else _toml(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"spec: {path.name} cannot be parsed ({first_line(e)}).") from None
    if not isinstance(found, dict):
        raise UserError(f"spec: {path.name} holds no table; see docs/scale.md for an example.")
    return found


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise UserError(
                "spec: Python 3.10 reads no TOML; install the package tomli, or write the spec as JSON."
            ) from None
    return tomllib.loads(text)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Prompts from a text file with one a line, or from JSON Lines of objects with an entry "prompt" (GenEval's form).

    Raises:
        UserError: the file is missing or has another form.
    """
    try:
        lines = [line.strip() for line in _bytes(path, "prompts").decode().splitlines() if line.strip()]
        if path.suffix.lower() in (".jsonl", ".json"):
            return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as e:
        raise UserError(f"prompts: {path.name} cannot be parsed ({first_line(e)}).") from None
    return [{PROMPT: line} for line in lines]


def from_table(table: Mapping[str, Any]) -> Spec:
    """A spec from the entries of a file, checked.

    Raises:
        UserError: an unknown entry, or a value of another type or out of range.
    """
    names = [f.name for f in fields(Spec)]
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}."
            raise UserError(f"spec: it has no entry {name!r}; {hint}")
        values[name] = _value(name, value)
    spec = Spec(**values)
    if not spec.samplers:
        raise UserError('spec: samplers is empty; name at least one, for example samplers = ["mar", "fasthybrid"].')
    if not spec.model:
        raise UserError('spec: model is empty; name at least one, for example model = "demo".')
    expand(spec)
    make(TarPromptSettings, spec.prompt_settings)
    return spec


def _value(name: str, value: Any) -> Any:
    if name in _RANGES:
        return _whole(name, value)
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise UserError(f"spec: {name} is {value!r}; it is one of {', '.join(_CHOICES[name])}.")
        return value
    if name in _NAMES:
        if not isinstance(value, str) or not value:
            raise UserError(f"spec: {name} is {value!r}; give a name.")
        return value
    if name == "set":
        return _settings(value)
    if name == "prompts":
        return _prompts(value)
    words = [w.strip() for w in value.split(",")] if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(w, str | int) and not isinstance(w, bool) for w in words):
        raise UserError(f"spec: {name} is {str(value)[:60]!r}; give a list of names.")
    return tuple(str(w) for w in words if str(w))


def _whole(name: str, value: Any) -> int:
    low, high = _RANGES[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"spec: {name} is {str(value)[:60]!r}, which is not a whole number.")
    if not low <= value <= high:
        raise UserError(f"spec: {name} is {value}, outside {low} to {high}.")
    return value


def _settings(table: Any) -> dict[str, tuple[Any, ...]]:
    """Settings by dotted name; nested tables, which TOML makes of unquoted dotted names, are flattened."""
    if not isinstance(table, Mapping):
        raise UserError("spec: set is no table; write [set] and below it lines such as cfg = 2.")
    out: dict[str, tuple[Any, ...]] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            nested = _settings(value)
            out |= {f"{name}.{inner}": values for inner, values in nested.items()}
            continue
        values = tuple(dict.fromkeys(map(_scalar(name), value if isinstance(value, list) else [value])))
        if not values:
            raise UserError(f"set: {name} lists no value, so the grid is empty; give at least one.")
        if len(values) > MOST_VALUES:
            raise UserError(f"set: {name} lists {len(values)} values; {MOST_VALUES} are possible.")
        out[str(name)] = values
    return out


def _scalar(name: str) -> Any:
    def check(value: Any) -> Any:
        if not isinstance(value, (str, int, float, bool)):
            raise UserError(f"set: {name} has the value {str(value)[:60]!r}; give numbers, words, or true and false.")
        return value

    return check


def _prompts(value: Any) -> tuple[Mapping[str, Any], ...]:
    found = [{PROMPT: p} if isinstance(p, str) else p for p in value] if isinstance(value, list) else []
    if not found or len(found) > MOST_PROMPTS:
        raise UserError(
            f"prompts: {len(found)} prompts; name a file, or give a list of 1 to {MOST_PROMPTS} texts, one an entry."
        )
    for i, p in enumerate(found):
        if not isinstance(p, Mapping) or not isinstance(p.get(PROMPT), str) or not p[PROMPT].strip():
            raise UserError(f'prompts: entry {i + 1} has no text; write one, or an object with an entry "{PROMPT}".')
    return tuple(found)


# ------------------------------------------------------------------------------------------------ the grid


def expand(spec: Spec) -> list[Combination]:
    """All combinations of a spec, in the order of its samplers.

    Raises:
        UserError: an unknown sampler or setting, a value out of range, or too many combinations.
    """
    keys = _keys(spec.samplers)
    own = _own(spec, keys)
    out: list[Combination] = []
    for key, entry in keys.items():
        values = own[key]
        if len(out) + _product(values) > MOST_CELLS:
            raise UserError(f"set: the grid has more than {MOST_CELLS} cells; give fewer values.")
        varied = [name for name, found in values.items() if len(found) > 1]
        for combination in itertools.product(*values.values()):
            asked = dict(zip(values, combination, strict=True))
            out.append(Combination(_choice(entry, asked), asked, _title(key, entry, asked, varied)))
    return out


def _product(values: Mapping[str, Sequence[Any]]) -> int:
    cells = 1
    for found in values.values():
        cells *= len(found)
    return cells


def _choice(entry: Entry, asked: Mapping[str, Any]) -> Choice:
    try:
        return choose(entry.name, asked)
    except UserError as e:
        raise UserError(f"set: {entry.name}.{e}") from None


def _keys(samplers: Sequence[str]) -> dict[str, Entry]:
    """Samplers by name, or by name and variant."""
    out: dict[str, Entry] = {}
    for name in samplers:
        kind, colon, variant = name.strip().lower().partition(":")
        entry = find(kind)
        out[f"{entry.name}{colon}{variant}"] = entry
    return out


def _own(spec: Spec, keys: Mapping[str, Entry]) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Values of every sampler: those for all, and over them those for one by its key."""
    shared: dict[str, tuple[Any, ...]] = {}
    own: dict[str, dict[str, tuple[Any, ...]]] = {key: {} for key in keys}
    for text, values in spec.set.items():
        sampler, dot, name = text.rpartition(".")
        if dot and sampler == PROMPT:
            if len(values) > 1:
                raise UserError(
                    f"set: {text} lists {len(values)} values; all cells draw the same prompts, so give one."
                )
            continue
        if dot and sampler not in own:
            kind, colon, variant = sampler.lower().partition(":")
            sampler = f"{find(kind).name}{colon}{variant}"
            if sampler not in own:
                raise UserError(f"set: {sampler} is not among the samplers of this sweep, {', '.join(own)}.")
        known = dict.fromkeys(n for key, e in keys.items() if not dot or key == sampler for n in knobs(e.settings))
        if name not in known and name != PRESET:
            whose = f"{sampler} has no" if dot else "no sampler of this sweep has a"
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join([*known, PRESET])}."
            raise UserError(f"set: {whose} setting {name}; {hint}")
        (own[sampler] if dot else shared)[name] = values
    return {
        key: {**{n: v for n, v in shared.items() if n in knobs(e.settings) or n == PRESET}, **own[key]}
        for key, e in keys.items()
    }


def _title(key: str, entry: Entry, asked: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Display name: the sampler, its variant and the settings that vary."""
    variant = key.partition(":")[2]
    names = [f"{name.replace('_', ' ')} {_shown(asked[name])}" for name in varied]
    return ", ".join([entry.title, *([variant] if variant else []), *names])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_values(spec: Spec, **values: Any) -> Spec:
    """The spec with other values, those that are not None, checked as the file's."""
    given = {name: _value(name, value) for name, value in values.items() if value is not None}
    return replace(spec, **given)


def from_manifest(manifest: Mapping[str, Any]) -> Spec:
    """The spec that a store's manifest records.

    Raises:
        UserError: the manifest is damaged.
    """
    table = manifest.get("spec")
    if not isinstance(table, Mapping):
        raise UserError("folder: its manifest holds no spec; run the sweep again to write it anew.")
    return from_table({name: value for name, value in table.items() if value not in ([], (), None)})
