"""Loads mutated files of every kind, each in a process of its own, and counts what happened.

Every case must end in success or in one short ``UserError``, without executing anything from the file, within the memory of
the file and 64 MB and within 1 s of CPU time, both beyond a normal load. A case is a function of the seed and its number.

    python tests/fuzz/fuzzer.py --cases 10000 --seed 0 [--only NUMBER]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fuzz")]

import conftest  # noqa: E402, F401  makes the checkout importable as fastar_nodes
import torch  # noqa: E402
from budget import Outcome, measure, problem  # noqa: E402
from mutations import mutate  # noqa: E402
from seeds import Seed, build  # noqa: E402

_EXTRA_SECONDS = 1.0  # CPU time beyond a normal load


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        kinds: outcomes.
        problems: (case, file, what is wrong).
        slow: (case, file, seconds) of cases that were over the CPU time twice.
        executed: cases that executed the payload.
    """

    kinds: Counter = field(default_factory=Counter)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    slow: list[tuple[int, str, float]] = field(default_factory=list)
    executed: int = 0
    memory: int = 0


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())


def place(source: Path, folder: Path) -> Path:
    """A copy of a file or folder."""
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return target


def run_case(number: int, seed: int, seeds: dict[Seed, Outcome], folder: Path) -> tuple[Seed, Outcome, str, bool]:
    """One case in an empty ``folder``: the seed file, the outcome, what is wrong, and whether the payload ran.

    ``seeds``: the valid files and the outcomes of loading them.
    """
    r = random.Random(f"{seed}/{number}")
    chosen = r.choice(list(seeds))
    (folder / "canary").mkdir()
    canary, outside = folder / "canary" / "sings", folder / "canary" / "outside.json"
    outside.write_text('{"secret": 1}')
    (folder / "models").mkdir()
    path = place(chosen.path, folder / "models")
    for i in range(r.choice((1, 1, 1, 2, 3))):
        mutate(r, path, outside, canary, fresh=not i)
    outcome = measure(lambda: chosen.load(path))
    return chosen, outcome, problem(outcome, size_of(path), seeds[chosen]), canary.exists()


def fuzz(cases: range, seed: int = 0, say=None) -> Tally:
    """Run cases; ``say`` is called after each with the tally."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "seeds").mkdir()
        seeds = {}
        for s in build(top / "seeds"):
            s.load(s.path)  # imports and caches
            outcome = measure(lambda s=s: s.load(s.path))
            if outcome.kind != "ok":
                raise AssertionError(f"{s.path.name} does not load: {outcome.message}")
            seeds[s] = outcome
        for number in cases:
            work = top / "case"
            work.mkdir()
            chosen, outcome, wrong, ran = run_case(number, seed, seeds, work)
            shutil.rmtree(work)
            tally.kinds[outcome.kind] += 1
            tally.executed += ran
            tally.memory = max(tally.memory, outcome.memory)
            if wrong:
                tally.problems.append((number, chosen.path.name, wrong))
            limit = seeds[chosen].seconds + _EXTRA_SECONDS
            if outcome.seconds > limit:  # again, since other processes slow down the caches
                work.mkdir()
                seconds = min(outcome.seconds, run_case(number, seed, seeds, work)[1].seconds)
                shutil.rmtree(work)
                if seconds > limit:
                    tally.slow.append((number, chosen.path.name, seconds))
            if say:
                say(number, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    options = parser.parse_args()
    cases = range(options.cases) if options.only is None else range(options.only, options.only + 1)
    shown = 0

    def say(number: int, tally: Tally) -> None:
        nonlocal shown
        for case, name, wrong in tally.problems[shown:]:
            print(f"case {case} ({name}): {wrong}", flush=True)
        shown = len(tally.problems)
        if number % 500 == 499:
            print(f"{number + 1} cases: {dict(tally.kinds)}", flush=True)

    tally = fuzz(cases, options.seed, say)
    for case, name, seconds in tally.slow:
        print(f"case {case} ({name}) took {seconds:.1f} s of CPU time")
    print(
        f"{len(cases)} cases, seed {options.seed}: {dict(tally.kinds)}, {tally.executed} executed, {len(tally.problems)} "
        f"problems, {len(tally.slow)} over the CPU time, at most {tally.memory >> 20} MB"
    )
    return bool(tally.problems or tally.executed or tally.slow)


if __name__ == "__main__":
    sys.exit(main())
