"""Networks that turn images into features, figures of features, and reference images.

FID, Inception score, KID, precision and recall are those of torch-fidelity. It is no dependency of the pack, imports
torchvision, and is imported when a measure needs it.
"""

from __future__ import annotations

import importlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError, first_line

INCEPTION = "inception"
# Inception of the original FID, converted from TensorFlow by torch-fidelity's authors.
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
SOURCE = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
_BATCH = 50


@lru_cache(maxsize=1)
def fidelity() -> Any:
    """torch-fidelity, with an extractor "fastar-rows" that takes rows of features as they are."""
    try:
        found: Any = importlib.import_module("torch_fidelity")
    except Exception as e:  # its torchvision fails in several ways beside another torch
        raise UserError(
            f"measures: torch-fidelity cannot be imported ({first_line(e)}); "
            "pip install torch-fidelity, with the torchvision of your torch, or choose frechet."
        ) from None

    class Rows(found.FeatureExtractorBase):
        def __init__(self, name: str, layers: list[str], **_: Any):
            super().__init__(name, layers)

        @staticmethod
        def get_provided_features_list() -> tuple[str, ...]:
            return ("rows",)

        @staticmethod
        def get_default_feature_layer_for_metric(metric: str) -> str:
            return "rows"

        @staticmethod
        def can_be_compiled() -> bool:
            return False

        def forward(self, rows: Tensor) -> tuple[Tensor]:
            return (rows,)

    found.register_feature_extractor("fastar-rows", Rows)
    return found


class _Dataset(torch.utils.data.Dataset):
    """Rows of an array."""

    def __init__(self, rows: np.ndarray):
        self.rows = torch.from_numpy(np.ascontiguousarray(rows, np.float32))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def figure(measure: str, rows: np.ndarray, reference: np.ndarray | None = None) -> float:
    """A figure of torch-fidelity."""
    package = fidelity()

    # What selects a figure, and where torch-fidelity returns it.
    kid = {"kid": True, "kid_subsets": 1, "kid_subset_size": len(rows)}
    table: dict[str, tuple[dict[str, Any], str]] = {
        "fid": ({"fid": True}, package.KEY_METRIC_FID),
        "is": ({"isc": True}, package.KEY_METRIC_ISC_MEAN),
        "kid": (kid, package.KEY_METRIC_KID_MEAN),
        "precision": ({"prc": True}, package.KEY_METRIC_PRECISION),
        "recall": ({"prc": True}, package.KEY_METRIC_RECALL),
    }
    options, key = table[measure]

    inputs = {"input1": _Dataset(rows)}
    if reference is not None:
        inputs["input2"] = _Dataset(reference)

    figures = package.calculate_metrics(
        **inputs,
        **options,
        feature_extractor="fastar-rows",
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    return float(figures[key])


@dataclass(frozen=True)
class Extractor:
    """A network that turns images into features."""

    name: str  # in tables, and part of what makes two figures comparable
    run: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # uint8 [n, H, W, 3] to features [n, D], and logits [n, C]

    def __call__(self, parts: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        """Features float32 [N, D] of images uint8 [n, H, W, 3] that come in parts, and logits [N, C] or None."""
        all_features = []
        all_logits = []

        for part in parts:
            for at in range(0, len(part), _BATCH):
                features, logits = self._part(part[at : at + _BATCH])
                all_features.append(features)
                if logits is not None:
                    all_logits.append(logits)

        return np.concatenate(all_features), np.concatenate(all_logits) if all_logits else None

    @torch.no_grad()
    def _part(self, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Features and logits of one part."""
        n = len(pictures)
        features, logits = self.run(torch.from_numpy(np.ascontiguousarray(pictures)))

        is_matrix = isinstance(features, Tensor) and features.ndim == 2 and len(features) == n
        if not is_matrix or not features.isfinite().all():
            raise UserError(f"extractor: {self.name} must return a tensor [{n}, D] of finite numbers for {n} images.")

        return features.float().cpu().numpy(), None if logits is None else logits.float().cpu().numpy()


def load_extractor(name: str, weights: Path | None, device: torch.device) -> Extractor:
    """An extractor by name."""
    if name == INCEPTION:
        return _inception(weights, device)

    module, _, function = name.partition(":")
    try:
        run = getattr(importlib.import_module(module), function)
    except Exception as e:  # whatever the user's module does at import
        raise UserError(f"extractor: {name!r} is not {INCEPTION} and cannot be imported ({first_line(e)}).") from None

    return Extractor(name, lambda pictures: (run(pictures), None))


def _inception(weights: Path | None, device: torch.device) -> Extractor:
    """Inception of the original FID, by torch-fidelity."""
    package = fidelity()
    path = weights or Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    if not path.is_file():
        raise UserError(f"inception: {path} is missing; download {SOURCE} (96 MB) to it, or name it by --inception.")

    # torch-fidelity unpickles whatever the file holds; it is given a copy with the tensors only. The file may be in the
    # format that torch wrote before 2020, which the loaders refuse.
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "inception.pth"
            torch.save(dict(state), copy)

            layers = ["2048", "logits_unbiased"]
            net = package.FeatureExtractorInceptionV3("inception-v3-compat", layers, str(copy)).eval().to(device)
    except Exception as e:  # a damaged file can raise any exception
        raise UserError(f"inception: {path.name} cannot be read, or holds another network ({first_line(e)}).") from None

    return Extractor(INCEPTION, lambda pictures: net(pictures.permute(0, 3, 1, 2).contiguous().to(device)))


@dataclass(frozen=True, eq=False)
class Reference:
    """What cells are compared with: images, their statistics, or both."""

    name: str  # of the file
    pictures: np.ndarray | None  # uint8 [N, H, W, 3]; None where the file holds statistics alone
    # Mean float64 [2048] and covariance [2048, 2048] of Inception's features of a larger set, which FID is of; None for
    # those of the images.
    moments: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of an image; None without images."""
        if self.pictures is None:
            return None

        return int(self.pictures.shape[1]), int(self.pictures.shape[2])


def open_reference(path: Path) -> Reference:
    """A reference: an npz file with ``arr_0`` uint8 [N, H, W, 3], as the ADM evaluator writes it.

    The ADM evaluator's own files also have ``mu`` and ``sigma``, of all images of the training set. A file may hold
    these two alone, as that of MAR's evaluation does.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            moments = (file["mu"], file["sigma"]) if "mu" in file and "sigma" in file else None
            alone = moments is not None and "arr_0" not in file
            pictures = None if alone else file["arr_0"]
        if pictures is not None:
            _expect_pictures(pictures)
        if moments is not None:
            _expect_moments(*moments)
    except (
        AttributeError,
        KeyError,
        IndexError,
        OSError,
        TypeError,
        ValueError,
        EOFError,
        MemoryError,
        zipfile.BadZipFile,
    ) as e:
        raise UserError(
            f"reference: {path.name} is not an npz file of images (arr_0) or statistics (mu, sigma) ({first_line(e)})."
        ) from None

    return Reference(path.name, pictures, moments)


def _expect_pictures(pictures: np.ndarray) -> None:
    """Raise a ValueError unless these are the images of a reference."""
    if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3 or not pictures.size:
        raise ValueError(f"{pictures.dtype} {list(pictures.shape)}, not uint8 images [N, H, W, 3]")


# Features of Inception.
_FEATURES = 2048


def _expect_moments(mean: np.ndarray, covariance: np.ndarray) -> None:
    """Raise a ValueError unless these are statistics of Inception's features."""
    if (mean.shape, covariance.shape) != ((_FEATURES,), (_FEATURES, _FEATURES)):
        raise ValueError(f"mu and sigma are not those of the {_FEATURES} features of Inception")
    if not all(part.dtype.kind == "f" and np.isfinite(part).all() for part in (mean, covariance)):
        raise ValueError("mu or sigma has values that are not finite")


def resized(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Images uint8 [n, H, W, 3] at another height and width: bicubic without antialiasing, as LlamaGen does."""
    if pictures.shape[1:3] == size:
        return pictures

    planes = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    scaled = F.interpolate(planes, size=size, mode="bicubic")

    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
