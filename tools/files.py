"""Paths of the demo's checkpoints in a checkout of the repository."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def checkpoint(name: str, folder: Path | None = None) -> Path:
    """Path of a checkpoint; the file need not exist.

    Args:
        name: one of the names of ``train-demo --only``.
        folder: the folder of all checkpoints. None selects the repository's own: ``tools/checkpoints`` for the judge,
            which is not shipped, and ``demo/checkpoints`` for the others.
    """
    if folder is None:
        folder = _ROOT / ("tools" if name == "judge" else "demo") / "checkpoints"
    return folder / f"{name}.safetensors"
