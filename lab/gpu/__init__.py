"""Measure all samplers on a GPU, part by part, and print a table.

In the order of their importance: whether all samplers and the products of quantised weights are right, the headlines,
then the others; a row takes a minute at most. For every model and sampler: the seconds of an image with each of
--speeds, how many operations and graphs the host launches for it, the memory, and whether tokens or latents equal those
of plain, bit for bit, from the same seed. Of auto and compile the last of three images counts, behind those that
recorded or compiled. The floor is the bytes of weights that all passes and head calls read, over the rate at which the
card copies; the share is the floor over the least seconds.

Sizes are the official ones with random weights, and acceptances say nothing about trained models. A diffusion head gets
small random numbers where a training begins with zeros, or images would not depend on it.

Results are kept in FOLDER/parts after every measurement; run the command again and it goes on where it was cut. To
measure a part again, delete its file. FOLDER/gpu.md and FOLDER/gpu.json hold everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...cli.bench import machine
from ...errors import UserError, unknown
from ...reports.files import as_text, replace_file, typed_path
from ...reports.table import markdown
from ...runs.loading import choose_device
from . import products
from .cases import PARTS, PRODUCTS
from .measure import PLAIN_AGAIN
from .store import BROKEN, PROBLEM, STUCK, PartFile, machine_of, write_machine

_NAMES = tuple(part.name for part in PARTS)
_WORKER = f"{__package__}.worker"
# Seconds that a process needs before it measures; with less left none is started.
_START = 15.0
# Why a process ended, by its exit code; others are signals.
_WHY = {BROKEN: "the device failed", STUCK: "it did not end"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"default all: {', '.join(_NAMES)}")
    add("--out", required=True, metavar="FOLDER", help="folder of the results")
    add("--speeds", default="plain,auto", metavar="A,B", help="values of speed to compare; default plain,auto")
    add("--seconds", type=float, default=560.0, help="most that this run may take; default 560")
    add("--device", default="cuda", help="default cuda")
    add("--rehearse", action="store_true", help="tiny stand-ins for all models, on the CPU: a test of this command")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    until = time.monotonic() + options.seconds
    for name in options.parts:
        if name not in _NAMES:
            raise unknown("part", f"{name!r} is unknown", name, _NAMES)
    out = typed_path(options.out, "out")
    device = choose_device("cpu" if options.rehearse else options.device)

    _expect_same_run(out, options.rehearse)
    _measure(options, out, device, until)

    rows = collected(out)
    about = machine_of(out)
    text = "\n\n".join([_heading(about), table(rows, about), *_products(rows)]) + "\n"
    replace_file(out / "gpu.json", as_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n"))
    replace_file(out / "gpu.md", as_text(text))
    print(text)
    return 0


def _expect_same_run(out: Path, rehearse: bool) -> None:
    """Raise a UserError if a folder holds a rehearsal and this is none, or the other way round."""
    if machine_of(out).get("rehearsal", rehearse) != rehearse:
        held = "measurements" if rehearse else "a rehearsal"
        raise UserError(
            f"out: {out} holds {held}; choose a different folder, because FastAR does not mix rehearsals with "
            "measurements."
        )


def _measure(options: argparse.Namespace, out: Path, device: torch.device, until: float) -> None:
    """Start processes that measure, each behind what broke the one before, until nothing is missing or time is over."""
    parts = [name for name in _NAMES if name in (options.parts or _NAMES)]
    command = [sys.executable, "-m", _WORKER, "--out", str(out), "--speeds", options.speeds, "--device", str(device)]
    if options.rehearse:
        command.append("--rehearse")

    write_machine(out, **_machine(device, options.rehearse))
    while True:
        if until - time.monotonic() < _START:
            print("the time is over; run the command again for the rest")
            return
        code = subprocess.run([*command, "--until", f"{until:.3f}", *parts]).returncode
        over = time.monotonic() > until - _START
        why = _WHY.get(code, f"its process ended with code {code}")
        ended = [PartFile(out, name).end_begun("" if over else why) for name in parts]
        if code == 0 or over:
            return
        if code != BROKEN and not any(ended):
            raise UserError(f"device: nothing was measured, because the process failed ({why}); see its output above.")
        print(f"the process of the measurements ended early: {why}", flush=True)


def _machine(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """The machine, without what it copies in a second, which a process measures that has the device."""
    about = {**machine(device), "device": device.type, "rehearsal": rehearse}
    if device.type == "cuda":
        about["cuda"] = torch.version.cuda
        about["allocator"] = torch.cuda.get_allocator_backend()
    return about


# ------------------------------------------------------------------------------------------------ the table


def collected(out: Path) -> list[dict[str, Any]]:
    """All rows, in the order of the parts."""
    rows = []
    for name in _NAMES:
        file = PartFile(out, name)
        rows += [{"part": name, **file.rows[key]} for key in sorted(file.rows, key=int)]
    return rows


def _heading(about: Mapping[str, Any]) -> str:
    """The line above the table."""
    rate = f", copies {about['copy_rate'] / 1e12:.2f} TB/s" if "copy_rate" in about else ""
    rehearsal = "a rehearsal with tiny models; " if about["rehearsal"] else ""
    return f"{rehearsal}{about['name']}, torch {about['torch']}{rate}"


def table(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """The rows as Markdown: of auto and compile the last image counts, behind those that recorded and compiled."""
    head = ["model", "batch", "dtype", "plain, s", "auto, s", "compile, s", "speed-up", "equal"]
    head += ["launches", "auto", "floor, s", "share %", "GB", "auto GB", "accepted %", "remarks"]
    out = [head]
    for row in rows:
        measured = row["measured"]
        plain = measured.get("plain", {})
        auto = measured.get("auto", {})
        best = _best(measured)
        floor = row["floor_bytes"] / about["copy_rate"] if row.get("floor_bytes") and "copy_rate" in about else None
        before, after = _last(plain), _last(auto)

        cells = [row["name"], str(row["batch"]), row.get("dtype", "")]
        cells += [_seconds(before), _seconds(after), _seconds(_last(measured.get("compile", {})))]
        cells.append(f"{before / after:.2f}" if before and after else "")
        cells.append(auto.get("equal", ""))
        cells += [_launches(measured.get("launches, plain", {})), _launches(measured.get("launches, auto", {}))]
        cells += [_seconds(floor), f"{100 * floor / best:.0f}" if floor and best else ""]
        cells += [_gigabytes(plain), _gigabytes(auto)]
        cells.append(f"{100 * row['acceptance']:.0f}" if row.get("acceptance") is not None else "")
        cells.append(_remarks(measured))
        out.append(cells)
    return markdown(out, empty=False)


def _products(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables of products, and what is right of them."""
    texts = []
    for row in rows:
        found = row["measured"].get(PRODUCTS, {})
        if "microseconds" in found:
            checks = [f"{name}: {'yes' if right else 'NO'}" for name, right in found["right"].items()]
            texts += ["Products, microseconds: " + "; ".join(checks), markdown(products.table(found), empty=False)]
    return texts


def _last(found: Mapping[str, Any]) -> float | None:
    """Seconds of the image that counts: the fastest of plain ones is the last one too, on a card that is warm."""
    seconds = found.get("seconds")
    return seconds[-1] if seconds else None


def _best(measured: Mapping[str, Any]) -> float | None:
    """The least seconds of all speeds."""
    found = [_last(measured[name]) for name in ("plain", "auto", "compile") if name in measured]
    return min((seconds for seconds in found if seconds), default=None)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _launches(found: Mapping[str, Any]) -> str:
    """Operations that were launched, and graphs."""
    if "operations" not in found:
        return ""
    about = "about " if found["extrapolated"] else ""
    graphs = f" + {found['replays']:,} graphs" if found["replays"] else ""
    return f"{about}{found['operations']:,}{graphs}"


def _gigabytes(found: Mapping[str, Any]) -> str:
    return f"{found['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in found else ""


def _remarks(measured: Mapping[str, Any]) -> str:
    """What went wrong, and how many images a speed has drawn if the last one is missing."""
    remarks = []
    for name, found in measured.items():
        if found.get(PROBLEM):
            remarks.append(f"{name}: {found[PROBLEM]}")
        elif not found.get("done"):
            remarks.append(f"{name}: cut")
        elif name in ("plain", PLAIN_AGAIN) and "equal" in found and (name != "plain" or found["equal"] != "yes"):
            remarks.append(f"plain equals plain: {found['equal']}")
        elif name == "auto" and found.get("note"):
            remarks.append(str(found["note"]))
    return "; ".join(remarks)
