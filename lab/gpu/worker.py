"""The process that measures: it goes through the parts until the time is over or the device fails.

A wrong CUDA graph can break the device for its process, and can keep it waiting for ever. Then this process ends, and
``lab.gpu`` starts another, which goes on after the measurement that broke it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError, first_line
from ...networks.speed import COMPILE, PLAIN
from ...reports.record import Report
from . import measure, products, rehearsal
from .cases import PARTS, PRODUCTS, ROW_SECONDS, Case, Part
from .measure import PLAIN_AGAIN, Prepared, TimeUp
from .store import BEGAN, BROKEN, DONE, PROBLEM, STUCK, PartFile, missing, write_machine

# Seconds by which a part may exceed its time before its process is ended.
GRACE = 25.0


class Broken(Exception):
    """The device answers every call with an error."""


def main() -> int:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--speeds")
    parser.add_argument("--device")
    parser.add_argument("--until", type=float)  # of time.monotonic, which is one clock for all processes
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("parts", nargs="+")
    options = parser.parse_args()

    if options.rehearse:
        rehearsal.make_tiny()
    device = torch.device(options.device)
    write_machine(options.out, copy_rate=measure.copy_rate(device))
    measure.release(device)

    for part in PARTS:
        if part.name not in options.parts:
            continue
        limit = min(options.until, time.monotonic() + part.seconds)
        if limit - time.monotonic() < 1:
            break
        try:
            with _watched(limit):
                _measure(part, PartFile(options.out, part.name), options, device, limit)
        except Broken:
            return BROKEN
    return 0


@contextmanager
def _watched(limit: float) -> Iterator[None]:
    """End this process if a block runs far beyond its time: it waits for a device that does not answer."""
    timer = threading.Timer(limit - time.monotonic() + GRACE, os._exit, (STUCK,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _measure(part: Part, file: PartFile, options: argparse.Namespace, device: torch.device, limit: float) -> None:
    """The rows of a part, each with the time of a row."""
    for i, case in enumerate(part.cases):
        row = file.row(i, case)
        own = "" if options.rehearse else case.speeds
        speeds = (own or options.speeds).split(",")
        of_part, limit = limit, min(limit, time.monotonic() + ROW_SECONDS)
        try:
            if case.arguments == PRODUCTS:
                _measured(case, row, file, PRODUCTS, partial(_products, device, options.rehearse), device, limit)
            else:
                more = rehearsal.shorter(case) if options.rehearse else ""
                _measure_ours(case, row, file, speeds, more, device, limit, i)
        except TimeUp:
            print(f"{case.name}: cut at its time", flush=True)
        finally:
            limit = of_part
            measure.release(device)


def _products(device: torch.device, rehearse: bool, found: dict[str, Any]) -> None:
    """Products of quantised weights."""
    found.update(products.measured(device, rehearse))


def _measure_ours(
    case: Case,
    row: dict[str, Any],
    file: PartFile,
    speeds: list[str],
    more: str,
    device: torch.device,
    limit: float,
    i: int,
) -> None:
    """A row of one of our samplers."""
    counted = [speed for speed in speeds if speed != COMPILE] if case.batch == 1 else []
    wanted = [speed for speed in speeds if missing(row, speed)]
    # What was recorded is there only in the process that draws the images, so it is counted behind them; plain is last.
    behind = [speed for speed in counted if speed != PLAIN and speed in wanted]
    at_last = [PLAIN] if PLAIN in counted and missing(row, f"launches, {PLAIN}") else []
    if not wanted and not at_last:
        return

    made = _prepared(case, row, file, more, device, limit)
    if made is None:
        return
    reference = file.reference(i)

    def draw(found: dict[str, Any]) -> None:
        report = measure.images(made, speed, found, file.save, limit, reference)
        _about(row, made, report)

    def draw_plain(found: dict[str, Any]) -> None:
        made.choose(PLAIN)
        found["equal"] = measure.compared(measure.draw(made, 0, limit)[0], reference)

    def count(found: dict[str, Any]) -> None:
        made.choose(speed)
        measure.launches(made, found, limit, reference)

    for speed in wanted:
        _measured(case, row, file, speed, draw, device, limit)
        if speed in behind and DONE in row["measured"][speed]:
            _measured(case, row, file, f"launches, {speed}", count, device, limit)
        # An image that differs means nothing where plain does not repeat itself.
        if row["measured"][speed].get("equal", "").startswith("no:"):
            _measured(case, row, file, PLAIN_AGAIN, draw_plain, device, limit)
    for speed in at_last:
        _measured(case, row, file, f"launches, {speed}", count, device, limit)


def _prepared(
    case: Case, row: dict[str, Any], file: PartFile, more: str, device: torch.device, limit: float
) -> Prepared | None:
    """The models of a case; None if they cannot be built."""
    made: list[Prepared] = []

    def build(found: dict[str, Any]) -> None:
        began = time.monotonic()
        made.append(measure.prepare(case, more, device))
        measure.wait(device)
        found["seconds"] = round(time.monotonic() - began, 2)

    if DONE in row["measured"].get("build", {}):  # by another process
        del row["measured"]["build"]
    _measured(case, row, file, "build", build, device, limit)
    return made[0] if made else None


def _about(row: dict[str, Any], made: Prepared, report: Report) -> None:
    """What is the same for every speed."""
    row.setdefault("model", report.model)
    row.setdefault("dtype", report.dtype)
    row.setdefault("counts", report.counts)
    row.setdefault("acceptance", report.acceptance)
    row.setdefault("floor_bytes", measure.floor_bytes(made, report))


def _measured(
    case: Case,
    row: dict[str, Any],
    file: PartFile,
    name: str,
    run: Callable[[dict[str, Any]], None],
    device: torch.device,
    limit: float,
) -> None:
    """Make a measurement if it is missing, and write how it ended.

    Raises:
        TimeUp: the time of the part is over.
        Broken: the device answers nothing any more.
    """
    if not missing(row, name):
        return
    if time.monotonic() > limit:
        raise TimeUp

    found: dict[str, Any] = {BEGAN: True}
    row["measured"][name] = found
    file.save()
    began = time.monotonic()
    try:
        run(found)
        measure.wait(device)
        found[DONE] = True
    except TimeUp:
        raise
    except UserError as error:
        found[PROBLEM] = str(error)
    except Exception as error:
        found[PROBLEM] = f"{type(error).__name__}: {first_line(error)}"[:300]
    finally:
        found.pop(BEGAN)
        file.save()

    seconds = found.get("seconds", "")
    said = found.get(PROBLEM) or " ".join(f"{key} {found[key]}" for key in ("equal", "operations") if key in found)
    batch = f", batch {case.batch}" if case.batch > 1 else ""
    print(f"{case.name}{batch}; {name}: {seconds} {said} ({time.monotonic() - began:.1f} s)", flush=True)

    if PROBLEM in found:
        _expect_device(device)


def _expect_device(device: torch.device) -> None:
    """Raise Broken if an error has made the device useless for this process."""
    with suppress(Exception):
        measure.release(device)
    try:
        torch.ones(8, device=device).sum().item()
    except Exception as error:
        raise Broken from error


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a device that is stuck would keep the process
