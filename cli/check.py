"""Check a model on this machine, from its files to its images, and write the results for an issue.

Every line of the table says what is expected, what was found, and whether it holds. Lines that need not hold, such as
seconds, are shown for comparison. The JSON file holds the same lines with versions, device and driver. It contains no
names of users, computers or folders, so you can attach it to an issue as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..assembly import AUTO, Source, models_folder
from ..conditions import ENCODER
from ..errors import UserError, unknown
from ..model_loaders.families import DTYPES, EIGHT_BITS
from ..model_loaders.networks.speed import PLAIN
from ..model_loaders.wrappers import WEIGHTS
from ..reports.files import Result, as_text, distinct, encoded, image_endings, output, save
from ..reports.record import VERSION
from ..reports.table import markdown
from .checks import LABEL, PROMPT, STEPS, Check, Line, run_steps
from .conditions import builder
from .machine import anonymous, environment, private_folders
from .options import MODEL_OPTIONS, SEEDS, source, whole
from .subject import Subject, all_entries, expect_disk, expect_memory, needed, precision, subject

_SECONDS = 1500


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    for name in ("model", "decoder", "tar", "ta-tok", "encoder", "device"):
        default, about = MODEL_OPTIONS[name]
        add(f"--{name}", default=default, help=about)

    add("--dtype", default=AUTO, choices=(AUTO, *DTYPES, *EIGHT_BITS), help="precision of the weights; default auto")
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="which weights to read from a training checkpoint: auto (default), ema or plain",
    )
    add("--models", metavar="DIR", help="folder of weight files and downloads; default as in compare")
    add("--label", help=f"class of the image, for models of class labels; default {LABEL}")
    add("--prompt", metavar="TEXT", help=f"prompt of the image, for models that read one; default {PROMPT!r}")
    add("--seed", default="7", help="seed of the noise; default 7")
    add("--quick", action="store_true", help="draw an image with few steps and skip the long checks")
    add("--only", metavar="STEPS", help=f"steps separated by commas: {', '.join(STEPS)}; files and weights always run")
    add(
        "--seconds",
        default=str(_SECONDS),
        metavar="N",
        help=f"start no further line after N seconds; default {_SECONDS}",
    )
    add("--out", default="check.png", metavar="FILE", help="the image; default check.png")
    add("--json", default="check.json", metavar="FILE", help="the results; default check.json")
    parser.set_defaults(speed=PLAIN)

    steps = "\n".join(f"  {name:<9}{step.about}" for name, step in STEPS.items())
    names = ", ".join(entry.id for entry in all_entries())
    parser.epilog = f"Steps:\n{steps}\n\nEntries of the catalogue: {names}."


def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a line that must hold does not."""
    # 1. Mistakes, before anything is downloaded.
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    seconds = whole(options.seconds, "seconds", 1, 1_000_000)
    names = _steps(options.only)
    out = output(options.out, "out", image_endings())
    numbers = output(options.json, "json", (".json",))
    assert out is not None and numbers is not None
    distinct(out=out, json=numbers)

    what = subject(options.model, options.models)
    _expect_used(what, options)
    files = source(options)
    draws = bool({"image", "dtype"} & set(names))
    wanted = needed(what, options.decoder, options.tar, options.ta_tok, options.encoder, draws)
    expect_disk(wanted, models_folder(options.models))
    expect_memory(what, files)

    # 2. The steps.
    readers = builder(files, tar=options.tar, ta_tok=options.ta_tok, encoder=options.encoder)
    check = Check(
        subject=what,
        files=files,
        readers=readers,
        prompt=options.prompt,
        label=options.label,
        seed=seed,
        decoder=options.decoder,
        weights=options.weights,
        quick=options.quick,
    )
    lines = run_steps(check, names, seconds, _tell)

    # 3. The files before the table: a reader of the table, such as head, may end this program.
    found = _record(check, lines, options)
    choices = (options.model, options.decoder, options.tar, options.ta_tok, options.encoder, options.out, options.json)
    private = private_folders(models_folder(options.models), choices)
    text = json.dumps(anonymous(found, private), indent=2, ensure_ascii=False)
    results = [Result("json", numbers, as_text(text + "\n"))]
    if check.image is not None:
        results.append(Result("out", out, encoded(check.image, out)))
    unsaved = save(results)

    print(table(lines))
    print(_summary(what, lines))
    if unsaved:
        raise UserError(unsaved)
    for result in results:
        print(f"{'results' if result.field == 'json' else 'image'}: {result.path}")

    if check.stopped:
        raise KeyboardInterrupt
    return int(any(line.broken for line in lines))


def _expect_used(what: Subject, options: argparse.Namespace) -> None:
    """Raise a UserError if an option was given that the model does not use: it would be ignored without a word."""
    reads_codes = what.files == "dtok"
    reads_text = what.network.endswith("-T2I") or what.files == "llamagen" and what.entry is None
    used = {
        "decoder": (bool(what.family), AUTO, "it is for models that draw"),
        "tar": (reads_codes, AUTO, "it is for Tar's de-tokenizers"),
        "ta_tok": (reads_codes, AUTO, "it is for Tar's de-tokenizers"),
        "encoder": (reads_text, ENCODER, "it is for text-to-image models of LlamaGen"),
    }

    for name, (fits, usual, whose) in used.items():
        if not fits and getattr(options, name) != usual:
            option = name.replace("_", "-")
            raise UserError(f"{option}: {what.name} does not use it, {whose}; leave it out.")


def _steps(only: str | None) -> list[str]:
    """The steps to run, by name; files and weights are always among them.

    Raises:
        UserError: an unknown step.
    """
    if only is None:
        return list(STEPS)

    asked = [name.strip() for name in only.split(",")]
    for name in asked:
        if name not in STEPS:
            raise unknown("only", f"there is no step {name[:40]!r}", name, STEPS)
    return [name for name in STEPS if name in ("files", "weights", *asked)]


def _tell(line: Line) -> None:
    """Show a line as soon as it is there: a check takes minutes."""
    with suppress(OSError):
        print(f"{line.check}: {line.result}", file=sys.stderr, flush=True)


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    rows = [["check", "expected", "found", "result"]]
    for line in lines:
        rows.append([line.check, line.expected, line.found, line.result])

    return markdown(rows)


def _summary(what: Subject, lines: Sequence[Line]) -> str:
    """One sentence on all lines."""
    counts = Counter(line.result for line in lines)
    told = ", ".join(f"{count} {result}" for result, count in counts.items())
    broken = [line.check for line in lines if line.broken]
    if not broken:
        return f"{what.name}: {told}; everything that must hold does."

    return f"{what.name}: {told}; what must hold and does not: {', '.join(broken)}."


def _record(check: Check, lines: Sequence[Line], options: argparse.Namespace) -> dict[str, Any]:
    """The results for the JSON file."""
    what = check.subject
    entry = what.entry
    reports = []
    for report in check.reports:
        reports.append({key: value for key, value in report.to_dict().items() if key != "conditions"})

    return {
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d"),
        "model": what.name,
        "family": what.files,
        "network": what.network or None,
        "revision": None if entry is None else entry.revision,
        "dtype": _dtype(what, check.files),
        "quick": check.quick,
        "seed": check.seed,
        "environment": environment(check.device),
        "lines": [
            {
                "check": line.check,
                "expected": line.expected,
                "found": line.found,
                "result": line.result,
                "must": line.must,
                "figures": dict(line.figures),
            }
            for line in lines
        ],
        "reports": reports,
    }


def _dtype(what: Subject, files: Source) -> str:
    """Name of the dtype of the model; "" of a tokenizer."""
    return "" if what.files == "tokenizer" else precision(what, files)
