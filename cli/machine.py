"""What a check says about the machine it ran on: versions, memory, and nothing about the user."""

from __future__ import annotations

import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Packages whose versions decide what runs.
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "huggingface-hub",
    "tokenizers",
    "transformers",
    "triton",
    "triton-windows",
    "pillow",
)
_DISTRIBUTION = "fastar-nodes"
_DRIVER = Path("/proc/driver/nvidia/version")
_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")
_VERSION = re.compile(r'^version\s*=\s*"([^"]+)"', re.MULTILINE)
# An absolute path on any system: only its last part is kept.
_PATH = re.compile(r"(?<![\w./\\:>])(?:~|[A-Za-z]:)?[/\\]{1,2}(?:[^\s/\\:;,'\"<>|]+[/\\]+)+([^\s/\\:;,'\"<>|]*)")
# Seconds between two looks at a process' memory.
_LOOK = 0.002


# ------------------------------------------------------------------------------------------------ environment


def pack_version() -> str:
    """Version of this pack: of its pyproject.toml, which is shipped with it."""
    with suppress(OSError):
        text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8-sig")
        found = _VERSION.search(text)
        if found:
            return found[1]

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(_DISTRIBUTION)
    return "unknown"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and memory, for a report to others; no name of a user, a computer or a folder."""
    packages: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    packages["torch"] = str(torch.__version__)

    return {
        "fastar": pack_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "packages": packages,
        "device": _device(device),
        "threads": torch.get_num_threads(),
        "host_memory_bytes": host_memory()[0],
    }


def _device(device: torch.device) -> dict[str, Any]:
    """What is known of a device."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine()}

    about = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, or the version of CUDA that it supports; None if neither is known."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(?:\.\d+)?", _DRIVER.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[0]

    with suppress(AttributeError, RuntimeError):
        number = int(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  it is there in builds for CUDA
        return f"CUDA {number // 1000}.{number % 1000 // 10}"
    return None


def anonymous(value: Any, folders: Mapping[str, Path]) -> Any:
    """A value for JSON without the user's paths.

    Args:
        value: of texts, numbers, lists and dictionaries.
        folders: known folders by the word that takes their place; inner ones first.
    """
    if isinstance(value, str):
        return _without_paths(value, folders)
    if isinstance(value, Mapping):
        return {name: anonymous(inner, folders) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [anonymous(inner, folders) for inner in value]
    return value


def _without_paths(text: str, folders: Mapping[str, Path]) -> str:
    for word, folder in folders.items():
        for spelling in {str(folder), folder.as_posix(), str(folder).replace("\\", "\\\\")}:
            if len(spelling) > 1:
                text = text.replace(spelling, f"<{word}>")

    return _PATH.sub(lambda found: f"<path>/{found[1]}", text)


def private_folders(models: Path | None, named: Iterable[str]) -> dict[str, Path]:
    """The folders of this user and their words, for :func:`anonymous`.

    Args:
        models: folder of weight files.
        named: files and folders that the user named, and other words.
    """
    found: dict[str, Path] = {}
    for i, name in enumerate(named):
        parent = Path(name).expanduser().parent
        if parent != Path():
            found[f"folder {i + 1}"] = parent
    if models is not None:
        found["models"] = models
    found["pack"] = Path(__file__).resolve().parents[1]
    with suppress(OSError):
        found["here"] = Path.cwd()
    with suppress(RuntimeError):
        found["home"] = Path.home()

    return found


# ------------------------------------------------------------------------------------------------ memory


def host_memory() -> tuple[int | None, int | None]:
    """Bytes of this computer's memory, and of what is free; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        return 1024 * int(lines["MemTotal"].split()[0]), 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None, None


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held

    return host_memory()[1]


def free_space(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent

    return shutil.disk_usage(folder).free


def _own_memory() -> int:
    """Bytes of this process that no file backs. Raises OSError: the system does not say."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("no RssAnon")


@dataclass
class Peak:
    """The growth of memory within a block of :func:`watched`."""

    bytes: int | None = None  # None: not known, see ``why``
    why: str = ""
    unused: float = 0.0  # share of the memory that the allocator may leave unused, in blocks larger than their tensors


@contextmanager
def watched(device: torch.device) -> Iterator[Peak]:
    """Measure by how much the memory grows at most within a block: that of a CUDA device, or on Linux this process'."""
    peak = Peak()
    if device.type == "cuda":
        peak.unused = 0.01
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return

    if device.type != "cpu":
        peak.why = f"{device.type} does not report its peak memory"
        yield peak
        return

    try:
        before = _own_memory()
    except (OSError, ValueError):
        peak.why = f"{platform.system()} does not report the memory of a process as Linux does"
        yield peak
        return

    finish = _sample(_own_memory)
    try:
        yield peak
    finally:
        peak.bytes = max(0, finish() - before)


def _sample(look: Callable[[], int]) -> Callable[[], int]:
    """Call ``look`` again and again in a thread; the function that is returned ends it and gives the largest number."""
    done = threading.Event()
    highest = [look()]

    def work() -> None:
        while not done.wait(_LOOK):
            highest[0] = max(highest[0], look())

    thread = threading.Thread(target=work, daemon=True, name="fastar-memory")
    thread.start()

    def finish() -> int:
        done.set()
        thread.join()
        return max(highest[0], look())

    return finish
