"""Mutation testing: change one expression of the package at a time and see whether a test fails.

    python tools/mutate.py --count 240 --seed 1 --out mutations.json

A mutant is one change of the syntax tree of a file in ``samplers``, ``model_loaders`` or ``reports``: another comparison or operator,
another number, a negated condition, a statement left out. Mutants are drawn with a seed, in turn from every kind of change. Each runs in
a copy of the checkout, against the tests that call the changed function (recorded by a first run of all tests), the fastest first, until
one fails. Linux and macOS only, since it forks.

``equivalent_mutants.json`` lists survivors that no test can notice, with the reason. The score leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("samplers", "model_loaders", "reports")
# Tests that import the copy of the package in their own process and have no fixed list of files.
TESTS = ("samplers", "model_loaders", "reports", "parity", "attacks", "nodes", "cli", "test_assembly.py")
# Compares constants, which no call leads to; runs for every change outside a function.
RECORDED = "tests/test_recorded_values.py"
# Most seconds of tests of one mutant, as recorded without it; a run may take this many times as long, and so much longer.
MOST_SECONDS, SLOWER, START = 25.0, 6.0, 30.0
MEMORY = 12 << 30
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")  # see mutant_name
# Imported once, before the processes of the mutants are forked.
PRELOADED: tuple[str, ...] = (
    "pytest",
    "numpy",
    "safetensors.torch",
    "PIL.Image",
    "hypothesis",
    "huggingface_hub",
    "tokenizers",
    "ftfy",
)
PRELOADED += ("transformers.models.t5.modeling_t5",)

_COMPARED: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_COMPARED |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}
_COMPARED |= {ast.NotIn: ast.In}
_COMPUTED: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
_COMPUTED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift}
# Arguments that only guard against mistakes in the code itself, or change speed only.
_NEUTRAL = ("strict", "frozen", "eq", "inplace", "non_blocking", "exist_ok", "sorted", "advanced", "step", "assign")


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
        file: path below the root.
        line: of the change.
        function: first line of the enclosing function, decorators included; 0 at module level.
        kind: of the change.
        node: index of the changed node in ``ast.walk``.
        text: the changed expression before and after.
    """

    file: str
    line: int
    function: int
    kind: str
    node: int
    text: str


# ------------------------------------------------------------------------------------------------ changes


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """All changes of a node: kind, and what replaces it."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        new.ops[0] = _COMPARED[type(node.ops[0])]()
        yield "comparison", new
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        texts = [n for n in ast.walk(node) if isinstance(n, ast.JoinedStr) or _is(n, str)]
        if not texts:
            new.op = _COMPUTED[type(node.op)]()
            yield "operator", new
    elif isinstance(node, ast.BoolOp):
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif _is(node, bool):
        yield "switch", ast.Constant(not node.value)  # type: ignore[attr-defined]
    elif _is(node, int):
        yield "number", ast.Constant(node.value + 1)  # type: ignore[attr-defined]
    elif _is(node, float):
        yield "number", ast.Constant(node.value * 1.5 if node.value else 0.5)  # type: ignore[attr-defined]
    elif isinstance(node, (ast.If, ast.IfExp)):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "condition", new
    elif isinstance(node, ast.Raise) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement", ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield "statement", ast.Pass()


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is kind


def _skipped(tree: ast.Module) -> set[int]:
    """Nodes (by ``id``) that are not changed: annotations, decorators, messages and neutral arguments."""
    out: set[int] = set()

    def skip(node: ast.AST | None) -> None:
        out.update(id(n) for n in ast.walk(node) if node is not None) if node is not None else None

    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for decorator in node.decorator_list:
                skip(decorator)
            skip(getattr(node, "returns", None))
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                skip(node)
        elif isinstance(node, ast.arg):
            skip(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            skip(node.annotation)
        elif isinstance(node, (ast.JoinedStr, ast.Assert)):
            skip(node)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            skip(node.exc)
        elif isinstance(node, ast.keyword) and node.arg in _NEUTRAL:
            skip(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("TypeVar", "with_traceback", "logging")):
            skip(node)
    return out


def mutants(path: Path, name: str) -> list[Mutant]:
    """All mutants of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped, functions = _skipped(tree), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions.append((first, node.end_lineno or first))
    out = []
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for kind, new in changed(node):
            line = getattr(node, "lineno", 0)
            inside = [first for first, last in functions if first <= line <= last]
            before, after = (ast.unparse(n).split("\n")[0][:70] for n in (node, new))
            out.append(Mutant(name, line, max(inside, default=0), kind, index, f"{before}  ->  {after}"))
    return out


def source_of(mutant: Mutant) -> str:
    """The file of a mutant, changed."""
    tree: Any = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    target = nodes[mutant.node]
    new = dict(changed(target))[mutant.kind]
    for parent in nodes:
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if v is target else v for v in value])
    return ast.unparse(ast.fix_missing_locations(tree))


def mutant_name(mutant: Mutant) -> str:
    """A name without a line number: file, line as it is in the source, and the change."""
    line = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
    return f"{mutant.file}: {line} | {mutant.text}"


def sample(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, in turn from every kind."""
    rng = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in every:
        kinds.setdefault(mutant.kind, []).append(mutant)
    for found in kinds.values():
        rng.shuffle(found)
    out: list[Mutant] = []
    while len(out) < count and any(kinds.values()):
        out += [found.pop() for _, found in sorted(kinds.items()) if found]
    return out[:count]


# ------------------------------------------------------------------------------------------------ tests


class Record:
    """A pytest plugin: seconds of every test that passed, and the functions of the package that it called."""

    def __init__(self, root: Path):
        self.folders = tuple(f"{root / name}{os.sep}" for name in MUTATED)
        self.root, self.tests, self.called = root, {}, set()

    def _trace(self, frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_filename.startswith(self.folders):
            self.called.add(frame.f_code)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self.called = set()
        sys.settrace(self._trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = {"seconds": report.duration}
        if report.when == "teardown" and report.nodeid in self.tests:
            sys.settrace(None)
            names = {(os.path.relpath(c.co_filename, self.root), c.co_firstlineno) for c in self.called}
            self.tests[report.nodeid]["called"] = sorted(names)


class Chosen:
    """A pytest plugin: runs the tests with the given ids, in their order, then those of further files."""

    def __init__(self, ids: list[str], also: Sequence[str]):
        self.place, self.also = {name: i for i, name in enumerate(ids)}, tuple(also)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [i for i in items if i.nodeid in self.place or i.nodeid.startswith(self.also)]
        items[:] = sorted(kept, key=lambda i: self.place.get(i.nodeid, len(self.place)))


def forked(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of ``work`` in a child process; None if it took longer."""
    child = os.fork()
    if not child:
        os.setsid()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        code = 70
        try:
            code = int(work())
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, 9)
    os.waitpid(child, 0)
    return None


def record(root: Path, out: Path) -> None:
    """Run all tests and write what they call to ``out``."""
    pytest = importlib.import_module("pytest")

    def work() -> int:
        plugin = Record(root)
        os.chdir(root)
        pytest.main(["-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS)], plugins=[plugin])
        out.write_text(json.dumps(plugin.tests))
        return 0

    forked(work, 7200)


def tests_of(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Ids of the tests that call the function of a mutant (of its file, at module level), the fastest first."""

    def calls(called: list[list[Any]]) -> bool:
        return any(file == mutant.file and mutant.function in (0, line) for file, line in called)

    found = sorted((test["seconds"], name) for name, test in known.items() if calls(test["called"]))
    out, total = [], 0.0
    for seconds, name in found:
        total += seconds
        if out and total > MOST_SECONDS:
            break
        out.append(name)
    return out


def judge(mutant: Mutant, root: Path, known: dict[str, Any], also: Sequence[str] = ()) -> str:
    """Run the tests of a mutant in the copy: "killed", "timeout", "survived" or "no test"."""
    pytest = importlib.import_module("pytest")

    ids = tests_of(mutant, known)
    also = also if mutant.function else (RECORDED, *also)
    if not ids and not also:
        return "no test"
    path = root / mutant.file
    before = path.read_bytes()
    path.write_text(source_of(mutant), encoding="utf-8")

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(root)
        files = list(dict.fromkeys([*(name.split("::")[0] for name in ids), *also]))
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files], plugins=[Chosen(ids, also)])

    try:
        expected = sum(known[name]["seconds"] for name in ids)
        status = forked(work, START + SLOWER * expected + 120 * len(also))
    finally:
        path.write_bytes(before)
    return "timeout" if status is None else "survived" if status == 0 else "killed"


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=240, help="mutants; default 240")
    parser.add_argument("--seed", type=int, default=1, help="of the draw; default 1")
    parser.add_argument(
        "--out", type=Path, default=Path("mutations.json"), help="results; an existing file is continued"
    )
    parser.add_argument("--map", type=Path, help="what the tests call; written if there is none, else read")
    parser.add_argument("--again", action="store_true", help="run only the mutants of --out that survived")
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="FILE", help="tests to run beside those that call a function"
    )
    options = parser.parse_args()
    # The folder of this file holds a package named statistics.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "tools"]
    sys.dont_write_bytecode = True
    import torch

    for name in PRELOADED:
        importlib.import_module(name)

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="mutate-")) / "copy"
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if not name.startswith(("workflows/", "tests/workflows/")) or name.endswith(".json"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    try:
        map_ = options.map or root / "map.json"
        if not map_.exists():
            record(root, map_.resolve())
        known = json.loads(map_.read_text())
        files = [p for name in MUTATED for p in sorted((ROOT / name).rglob("*.py"))]
        every = [m for p in files for m in mutants(p, p.relative_to(ROOT).as_posix())]
        return run(sample(every, options.count, options.seed), len(every), root, known, options)
    finally:
        shutil.rmtree(root.parent)


def run(chosen: list[Mutant], of: int, root: Path, known: dict[str, Any], options: argparse.Namespace) -> int:
    """Judge mutants, write every result at once, print the survivors and the score."""
    results: dict[str, str] = json.loads(options.out.read_text()) if options.out.exists() else {}
    keys = {f"{m.file}:{m.line} {m.kind}: {m.text}": m for m in chosen}
    for key, mutant in keys.items():
        if key not in results or options.again and results[key] in ("survived", "no test"):
            results[key] = judge(mutant, root, known, options.also)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{results[key]:9} {key}", flush=True)
    reasons: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    left = {key: m for key, m in keys.items() if results[key] in ("survived", "no test")}
    same = [key for key, m in left.items() if mutant_name(m) in reasons]
    killed, count = len(keys) - len(left), len(keys) - len(same)
    print(
        f"{len(keys)} of {of} mutants (seed {options.seed}): {killed} killed, {len(same)} equivalent; "
        f"{100 * killed / max(1, count):.1f} % of the other {count} killed"
    )
    for key in left:
        print(f"  {'equivalent' if key in same else results[key]}: {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
