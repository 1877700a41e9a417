"""Mutation testing: change one expression of the package at a time and see whether a test fails.

    python tools/mutate.py --formulas --count 100 --seed 1 --map calls.json --out mutations.json

A mutant is one change of the syntax tree of a file: another comparison, operator, number, sign or function, a negated condition, a
statement left out. Mutants are chosen with a seed, in turn from every kind of change, in ``samplers``, ``model_loaders`` and
``reports``, or with ``--formulas`` among the arithmetic of the samplers only, tables and lambdas of a module included. Each runs
in a copy of git's index, against the tests that call the changed function, the fastest first, until one fails. A first run of all
tests records what they call. Linux and macOS only, since it forks.

``equivalent_mutants.json`` lists survivors that no test can notice, with the reason. The score leaves them out.
"""

import argparse
import ast
import copy
import importlib
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
# Files that are changed, and the tests that run: those that import the copy of the package in their own process.
PACKAGE = ("samplers", "model_loaders", "reports")
TESTS = ("samplers", "model_loaders", "reports", "parity", "attacks", "nodes", "cli", "test_assembly.py")
FORMULAS = ("samplers/mar", "samplers/tokens", "samplers/noise.py")
FORMULA_TESTS = ("samplers", "parity", "test_recorded_values.py")
FORMULA_KINDS = ("comparison", "BinOp", "number", "sign", "function")
# Most seconds of tests of one mutant, as recorded without it; a run may take this many times as long, and so much longer.
MOST_SECONDS, SLOWER, START = 60.0, 6.0, 30.0
MEMORY = 12 << 30
# Imported once, before the processes of the mutants are forked.
PRELOADED = "torch pytest numpy safetensors.torch PIL.Image hypothesis huggingface_hub transformers.models.t5"

OPERATORS: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
OPERATORS |= {ast.In: ast.NotIn, ast.Add: ast.Sub, ast.LShift: ast.RShift, ast.And: ast.Or}
OPERATORS |= {new: old for old, new in OPERATORS.items()}
OPERATORS |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
PAIRS = "min:max max:min amin:amax amax:amin any:all all:any floor:ceil ceil:floor round:int sin:cos cos:sin log:log2"
PAIRS += " exp:expm1 expm1:exp sqrt:square minimum:maximum maximum:minimum cumsum:cumprod cumprod:cumsum"
FUNCTIONS = dict(pair.split(":") for pair in PAIRS.split())
# Arguments that only guard against mistakes in the code itself, or change speed or the order of equal values only.
NEUTRAL = ("strict", "frozen", "eq", "inplace", "non_blocking", "exist_ok", "sorted", "assign", "maxsize", "keepdim")


class Mutant(NamedTuple):
    """A change of a file: its path, the first line of the enclosing function (decorators included; 0 at module level), the kind of
    change, the index of the node in ``ast.walk``, and a name: file, line as it is in the source, and the change."""

    file: str
    function: int
    kind: str
    node: int
    name: str


# ------------------------------------------------------------------------------------------------ changes


def changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """The change of a node: kind, and what replaces it."""
    new: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op, *_]):
            new.ops[0] = OPERATORS[type(op)]()
            return "comparison", new
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            new.op = OPERATORS[type(op)]()
            text = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))
            return None if text and isinstance(node, ast.BinOp) else (type(node).__name__, new)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            return "sign", operand
        case ast.Constant(value=bool(value)):
            return "switch", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return "number", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            return "number", ast.Constant(value * 1.5 or 0.5)
        case ast.If() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            return "condition", new
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            return "statement", ast.Pass()
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in FUNCTIONS:
            setattr(new, "attr" if isinstance(node, ast.Attribute) else "id", FUNCTIONS[name])
            return "function", new
    return None


def skipped(tree: ast.Module, formulas: bool) -> set[int]:
    """Nodes (by ``id``) that are not changed: messages, neutral arguments, protocols, and ``knob(...)``, whose values
    ``test_recorded_values.py`` compares; among formulas also indices and named arguments such as ``dim``."""
    parts: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr() | ast.Assert() | ast.Call(func=ast.Name(id="knob" | "TypeVar")):
                parts.append(node)
            case ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
                parts.append(node)
            case ast.Raise(exc=ast.AST() as part) | ast.AnnAssign(annotation=part):
                parts.append(part)
            case ast.keyword(arg=name, value=part) if formulas or name in NEUTRAL:
                parts.append(part)
            case ast.Subscript(slice=part) if formulas:
                parts.append(part)
    return {id(node) for part in parts for node in ast.walk(part)}


def mutants(root: Path, name: str, formulas: bool) -> list[Mutant]:
    """All mutants of a file."""
    text = (root / name).read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    left_out, out = skipped(tree, formulas), []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    spans = [(min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.end_lineno or 0) for f in functions]
    for index, node in enumerate(ast.walk(tree)):
        found = None if id(node) in left_out else changed(node)
        if found and (not formulas or found[0] in FORMULA_KINDS):
            line = getattr(node, "lineno", 0)
            inside = max((first for first, last in spans if first <= line <= last), default=0)
            before, after = (ast.unparse(n).split("\n")[0][:70] for n in (node, found[1]))
            text = f"{name}: {lines[line - 1].strip()} | {before}  ->  {after}"
            out.append(Mutant(name, inside, found[0], index, text))
    return out


def source_of(mutant: Mutant, root: Path) -> str:
    """The file of a mutant, changed."""
    tree = ast.parse((root / mutant.file).read_text(encoding="utf-8"))
    target = list(ast.walk(tree))[mutant.node]

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return changed(node)[1] if node is target else self.generic_visit(node)  # type: ignore[index]

    return ast.unparse(ast.fix_missing_locations(Change().visit(tree)))


def sample(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, in turn from every kind."""
    random.Random(seed).shuffle(every)
    seen: Counter[str] = Counter()

    def rank(mutant: Mutant) -> int:
        seen[mutant.kind] += 1
        return seen[mutant.kind]

    return sorted(every, key=rank)[:count]


# ------------------------------------------------------------------------------------------------ tests


class Record:
    """A pytest plugin: writes seconds of every test that passed, and the functions of the package that it called, to ``out``."""

    def __init__(self, root: Path, out: Path):
        self.folders = tuple(f"{root / name}{os.sep}" for name in PACKAGE)
        self.root, self.out, self.tests, self.called = root, out, dict[str, Any](), set[Any]()

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

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps(self.tests))


class Chosen:
    """A pytest plugin: runs the tests with the given ids, in their order."""

    def __init__(self, ids: list[str]):
        self.place = {name: i for i, name in enumerate(ids)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])


def forked(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of ``work`` in a silent child process; None if it took longer."""

    def silent() -> None:
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os._exit(work())

    child = multiprocessing.get_context("fork").Process(target=silent)
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        os.killpg(child.pid or 0, 9)
    return child.exitcode


def tested(root: Path, arguments: list[str], plugin: Any) -> int:
    """Run pytest in the copy, in this process."""
    os.chdir(root)
    return importlib.import_module("pytest").main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin])


def tests_of(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Ids of the tests that call the function of a mutant (of its file, at module level), the fastest first."""

    def calls(called: list[list[Any]]) -> bool:
        return any(file == mutant.file and mutant.function in (0, line) for file, line in called)

    out, total = [], 0.0
    for seconds, name in sorted((test["seconds"], name) for name, test in known.items() if calls(test["called"])):
        total += seconds
        if out and total > MOST_SECONDS:
            break
        out.append(name)
    return out


def judge(mutant: Mutant, root: Path, known: dict[str, Any]) -> str:
    """Run the tests of a mutant in the copy: "noticed", "timeout", "survived" or "no test"."""
    ids = tests_of(mutant, known)
    if not ids:
        return "no test"
    arguments = ["-x", *dict.fromkeys(name.split("::")[0] for name in ids)]
    limit = START + SLOWER * sum(known[name]["seconds"] for name in ids)
    path = root / mutant.file
    before = path.read_bytes()
    path.write_text(source_of(mutant, root), encoding="utf-8")
    try:
        status = forked(lambda: tested(root, arguments, Chosen(ids)), limit)
    finally:
        path.write_bytes(before)
    return "timeout" if status is None else "survived" if status == 0 else "noticed"


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formulas", action="store_true", help="only the samplers' arithmetic and its tests")
    parser.add_argument("--count", type=int, default=100, help="mutants; default 100")
    parser.add_argument("--seed", type=int, default=1, help="of the choice; default 1")
    parser.add_argument("--out", type=Path, default="mutations.json", help="results; entries there are not run again")
    parser.add_argument("--map", type=Path, default="calls.json", help="what the tests call; written if there is none")
    options = parser.parse_args()
    # The folder of this file holds a package named statistics.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "tools"]
    sys.dont_write_bytecode = True
    for name in PRELOADED.split():
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        subprocess.check_call(["git", "checkout-index", "--all", f"--prefix={root}/"], cwd=ROOT)
        if not options.map.exists():
            arguments = [f"tests/{name}" for name in (FORMULA_TESTS if options.formulas else TESTS)]
            forked(lambda: tested(root, arguments, Record(root, options.map.resolve())), 7200)
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        names = [name for name in names if name.startswith(FORMULAS if options.formulas else PACKAGE)]
        every = [mutant for name in names for mutant in mutants(root, name, options.formulas)]
        run(sample(every, options.count, options.seed), len(every), root, options)
    return 0


def run(chosen: list[Mutant], of: int, root: Path, options: argparse.Namespace) -> None:
    """Judge mutants, write every result at once, print the survivors and the score."""
    known = json.loads(options.map.read_text())
    results: dict[str, str] = json.loads(options.out.read_text()) if options.out.exists() else {}
    reasons: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    for mutant in chosen:
        if mutant.name not in results:
            results[mutant.name] = judge(mutant, root, known)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{results[mutant.name]:9} {mutant.name}", flush=True)
    names = dict.fromkeys(mutant.name for mutant in chosen)
    left = [name for name in names if results[name] in ("survived", "no test")]
    same, noticed = [name for name in left if name in reasons], len(names) - len(left)
    print(
        f"{len(names)} of {of} mutants (seed {options.seed}): {noticed} noticed, {len(same)} equivalent; "
        f"{100 * noticed / max(1, len(names) - len(same)):.1f} % of the others noticed"
    )
    for name in left:
        print(f"  {'equivalent' if name in same else results[name]}: {name}")


if __name__ == "__main__":
    sys.exit(main())
