"""Loads mutated files of every kind, each in a process of its own, and counts what happened.

Every case must end in success or in one short ``UserError``, without executing anything from the file, and within the
memory of the file and 64 MB beyond a normal load. A case is a function of the seed and its number.

    python tests/lib/fuzzer.py --cases 10000 --seed 0 [--only NUMBER]
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import checkout  # noqa: F401  makes it importable as fastar_nodes
import torch
from budget import Outcome, measure, problem
from mutations import mutate
from seeds import Seed, build


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())


def place(source: Path, folder: Path) -> Path:
    """A copy of a file or folder."""
    copy = shutil.copytree if source.is_dir() else shutil.copyfile
    return Path(copy(source, folder / source.name))


def run_case(number: int, seed: int, chosen: Seed, normal: Outcome, folder: Path) -> tuple[Outcome, str]:
    """One case in an empty ``folder``: the outcome and what is
    wrong; ``normal``: the outcome of loading the valid file.
    """
    r = random.Random(f"{seed}/{number}/{chosen.path.name}")
    (folder / "canary").mkdir(parents=True)
    canary, outside = folder / "canary" / "sings", folder / "canary" / "outside.json"
    outside.write_text('{"secret": 1}')
    (folder / "models").mkdir()
    path = place(chosen.path, folder / "models")
    for i in range(r.choice((1, 1, 1, 2, 3))):
        mutate(r, path, outside, canary, fresh=not i)
    outcome = measure(lambda: chosen.load(path))
    wrong = "the payload ran" if canary.exists() else problem(outcome, size_of(path), normal)
    shutil.rmtree(folder)
    return outcome, wrong


def fuzz(cases: range, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Run cases; counts of the outcomes, and the problems, which are also printed when they occur."""
    torch.set_num_threads(1)
    kinds, problems = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "seeds").mkdir()
        normal = {}
        for s in build(top / "seeds"):
            s.load(s.path)  # imports and caches
            normal[s] = measure(lambda s=s: s.load(s.path))
            if normal[s].kind != "ok":
                raise AssertionError(f"{s.path.name} does not load: {normal[s].message}")
        for number in cases:
            chosen = random.Random(f"{seed}/{number}").choice(list(normal))
            outcome, wrong = run_case(number, seed, chosen, normal[chosen], top / "case")
            kinds[outcome.kind] += 1
            if wrong:
                problems.append(f"case {number} ({chosen.path.name}): {wrong}")
                print(problems[-1], flush=True)
            if number % 500 == 499:
                print(f"{number + 1} cases: {dict(kinds)}", flush=True)
    return kinds, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    options = parser.parse_args()
    cases = range(options.cases) if options.only is None else range(options.only, options.only + 1)
    kinds, problems = fuzz(cases, options.seed)
    print(f"{len(cases)} cases, seed {options.seed}: {dict(kinds)}, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
