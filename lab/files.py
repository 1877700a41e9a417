"""Paths of the demo's checkpoints in a checkout of the repository."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def checkpoint(name: str, folder: Path | None = None) -> Path:
    """Path of a checkpoint of ``train-demo`` in a folder; None: the
    repository's own, ``lab`` for the judge, which is not shipped.
    """
    if folder is None:
        folder = _ROOT / ("lab" if name in ("judge", "judge-patches") else "demo") / "checkpoints"
    return folder / f"{name}.safetensors"
