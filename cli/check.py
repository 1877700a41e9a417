"""Check a model on this machine: are its files, its memory and its seconds right?

It finds or downloads the files and compares them with the catalogue, loads the model, draws one image, and draws it
again with every other sampler that the model has. The JSON file holds the table with versions, device and driver, for
an issue. It contains no names of users, computers or folders, so you can attach it as it is. To measure a speed-up, use
bench.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import UserError
from ..model_loaders.files.wrappers import WEIGHTS
from ..model_loaders.kinds import ALL_DTYPES
from ..networks.speed import PLAIN
from ..reports.files import Result, as_text, distinct, encoded, image_endings, output, save
from ..reports.record import VERSION
from ..reports.table import literal, markdown
from ..runs.limits import SEEDS
from ..runs.loading import AUTO, expect_used, models_folder
from ..runs.memory.fitting import DRAWING, card_of, dtypes_for, need, seconds
from ..runs.registry import FAMILIES
from ..samplers.conditioning import TextCondition
from .checks import LABEL, PROMPT, Check, Line, run_steps
from .conditions import builder
from .machine import anonymous, environment, private_folders
from .options import MODEL_OPTIONS, models_option, source, whole
from .subject import Subject, expect_disk, expect_memory, needed, subject

# Characters of a cell of the table; a longer text stands below the table.
_CELL = 48


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    for name in ("model", "decoder", "tar", "ta-tok", "encoder", "device"):
        default, about = MODEL_OPTIONS[name]
        add(f"--{name}", default=default, help=about)

    add("--dtype", default=AUTO, choices=(AUTO, *ALL_DTYPES), help="precision of the weights; default auto")
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="which weights to read from a training checkpoint: auto (default), ema or trained",
    )
    models_option(parser)
    add("--label", help=f"class of the image, for models that read class labels; default {LABEL}")
    add("--prompt", metavar="TEXT", help=f"prompt of the image, for models that read prompts; default {PROMPT!r}")
    add(
        "--memory",
        metavar="GB",
        help="run nothing; only show which dtypes of a catalogue entry fit a GPU with this much memory, and about how "
        "long an image takes",
    )
    add("--seed", default="7", help="seed of the noise; default 7")
    add(
        "--quick",
        action="store_true",
        help="run only the first AR step, passes or blocks instead of generating images",
    )
    add("--out", default="check.png", metavar="FILE", help="the image; default check.png")
    add("--json", default="check.json", metavar="FILE", help="the results; default check.json")
    parser.set_defaults(speed=PLAIN)


def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 if something is wrong."""
    # 1. Mistakes, before anything is downloaded.
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    out = output(options.out, "out", image_endings())
    numbers = output(options.json, "json", (".json",))
    assert out is not None and numbers is not None
    distinct(out=out, json=numbers)

    what = subject(options.model, options.models)
    if options.memory is not None:
        print(fitting(what, whole(options.memory, "memory", 4, 1024)))
        return 0
    _expect_used(what, options)
    files = source(options)
    wanted = needed(what, options.decoder, options.tar, options.ta_tok, options.encoder, prompts=not options.quick)
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
    )
    lines = run_steps(check, options.quick, _tell)

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
    reads = set(FAMILIES[what.family].reads if what.family else ())
    # What a file reads is not known before it is loaded.
    if what.entry is not None and what.condition != TextCondition.kind:
        reads.discard(TextCondition.kind)

    given = {name: getattr(options, name.replace("-", "_")) for name in ("decoder", "tar", "ta-tok", "encoder")}
    expect_used(given, (), reads, f"{what.name} does not use")


def fitting(what: Subject, memory: int) -> str:
    """In which dtypes a published model fits into a GPU's memory, and about how many seconds an image takes.

    Raises:
        UserError: the model is included in FastAR, is not in the catalogue, or generates no images.
    """
    entry = what.entry
    if entry is None or entry.built_in or entry.family not in DRAWING or not entry.network:
        raise UserError(
            f"memory: --memory needs a published model that generates images, but {what.name} is not one; name such a "
            "model, for example janus-pro-7b."
        )

    card = card_of(memory)
    rows = [["dtype", "GB", f"{memory} GB", "seconds per image, about"]]
    for dtype in dtypes_for(entry):
        needed = need(entry, dtype)
        taken = seconds(entry, dtype, card)
        fits = (
            "fits" if needed.fits(memory) else "does not fit; with speed plain, ComfyUI streams a part of the weights"
        )
        rows.append([dtype, f"{needed.total / 1e9:.1f}", fits, "" if taken is None else f"{taken:.0f}"])

    about = f"{entry.id}, one image, without its decoder. Computed for {card.name}, not measured."
    return f"{markdown(rows, empty=False)}\n{about}"


def _tell(line: Line) -> None:
    """Show a line as soon as it is there: a check takes minutes."""
    with suppress(OSError):
        print(f"{line.check}: {line.result}", file=sys.stderr, flush=True)


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table that fits a screen; what is too long for it stands below."""
    rows = [["check", "found", "expected", "result"]]
    below = []
    for line in lines:
        found = line.found
        if len(found) > _CELL:
            below.append(f"{line.check}: {literal(found, len(found))}")
            found = "see below"
        rows.append([line.check, found, line.expected, line.result])

    return "\n".join([markdown(rows), *below])


def _summary(what: Subject, lines: Sequence[Line]) -> str:
    """One sentence on all lines."""
    broken = [line.check for line in lines if line.broken]
    if not broken:
        return f"{what.name}: everything is as expected."
    return f"{what.name}: not as expected: {', '.join(broken)}."


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
        "dtype": options.dtype,
        "quick": options.quick,
        "seed": check.seed,
        "environment": environment(check.device),
        "lines": [
            {
                "check": line.check,
                "found": line.found,
                "expected": line.expected,
                "result": line.result,
                "figures": dict(line.figures),
            }
            for line in lines
        ],
        "reports": reports,
    }
