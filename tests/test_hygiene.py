"""What the registry's scanner reports must not occur in the shipped files, except in the places listed here."""

import ast
import os
import signal
from pathlib import Path

import pytest
from timeouts import limited

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("assembly.py", "errors.py", "__init__.py", "__main__.py")
PACKAGES = ("cli", "model_loaders", "nodes", "reports", "samplers")

DOWNLOADER = {"model_loaders/hub.py"}
CHECKPOINT_READER = {"model_loaders/checkpoint.py"}
# COMFYUI_PATH, the folder whose models the command line lists beside its own.
ENVIRONMENT = {"cli/options.py"}

# Names of calls and modules: files that may contain them.
RULES: dict[str, set[str]] = {
    **dict.fromkeys(("exec", "eval", "compile", "__import__"), set()),
    **dict.fromkeys(("subprocess", "multiprocessing", "ctypes", "pty", "pip", "ensurepip"), set()),
    **dict.fromkeys(("os.system", "os.popen", "os.putenv", "os.fork", "os.startfile"), set()),
    **dict.fromkeys(("os.exec*", "os.spawn*", "os.posix_spawn*"), set()),
    **dict.fromkeys(("os.environ", "os.getenv"), ENVIRONMENT),
    **dict.fromkeys(("urllib.request", "urllib3", "requests", "socket", "http", "httpx", "aiohttp"), DOWNLOADER),
    **dict.fromkeys(("huggingface_hub", "ftplib", "smtplib", "telnetlib"), DOWNLOADER),
    **dict.fromkeys(("pickle", "torch.load"), CHECKPOINT_READER),
    **dict.fromkeys(("marshal", "shelve", "dill", "cloudpickle", "joblib"), set()),
}


def sources() -> list[Path]:
    files = [ROOT / name for name in SHIPPED if (ROOT / name).is_file()]
    return sorted([*files, *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))])


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of nested attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (stem := dotted(node.value)):
        return f"{stem}.{node.attr}"
    return ""


def uses(text: str) -> set[str]:
    """Every module imported, attribute read and function called in a source text, by its dotted name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(f"{node.func.id}()")
    return found


def violations(text: str, name: str) -> set[str]:
    """The rules that a file breaks."""
    found, broken = uses(text), set()
    for rule, allowed in RULES.items():
        if rule.endswith("*"):
            hit = any(use.startswith(rule[:-1]) for use in found)
        else:
            hit = any(use in (rule, f"{rule}()") or use.startswith(f"{rule}.") for use in found)
        if hit and name not in allowed:
            broken.add(rule)
    return broken


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_scanner_findings(path):
    assert violations(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()) == set()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("exec('1')", "exec"),
        ("def f():\n    return eval('1')", "eval"),
        ("import subprocess", "subprocess"),
        ("from subprocess import run", "subprocess"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os\nos.execvp('ls', [])", "os.exec*"),
        ("import os\nx = os.environ['HOME']", "os.environ"),
        ("from os import getenv", "os.getenv"),
        ("import urllib.request", "urllib.request"),
        ("from urllib import request", "urllib.request"),
        ("import httpx", "httpx"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import pickle", "pickle"),
    ],
)
def test_the_rules_find_violations(text, rule):
    assert rule in violations(text, "samplers/x.py")


def test_the_rules_pass_what_is_harmless():
    text = "from urllib.parse import quote\nimport re, os\nnet.eval()\nre.compile('x')\nos.path.exists('x')\nx.socket"
    assert violations(text, "samplers/x.py") == set()
    assert violations("import os\nos.environ.get('COMFYUI_PATH')", "cli/options.py") == set()


def test_test_files_have_names_of_their_own():
    """pytest imports them by name, without their folder, so that two of one name stop the collection."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="a time limit is a signal of POSIX")
def test_a_wait_without_an_end_fails(monkeypatch):
    monkeypatch.delenv("FASTAR_SOAK", raising=False)
    read, _ = os.pipe()
    with pytest.raises(pytest.fail.Exception, match="no end within 1 s"), limited(1):
        os.read(read, 1)
