"""Inception's features of images, and reference images.

The network is torch-fidelity's. That package is no dependency of the pack, imports torchvision, and is imported when a
measure needs it.
"""

from __future__ import annotations

import importlib
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...errors import UserError, first_line

# Inception of the original FID, converted from TensorFlow by torch-fidelity's authors.
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
SOURCE = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
_BATCH = 50


class Inception:
    """Inception of the original FID.

    Raises:
        UserError: torch-fidelity or the weights are not here, or the file cannot be read.
    """

    def __init__(self, device: torch.device):
        try:
            package: Any = importlib.import_module("torch_fidelity")
        except Exception as e:  # its torchvision fails in several ways beside another torch
            raise UserError(
                f"measures: torch-fidelity cannot be imported ({first_line(e)}); install torch-fidelity, and the "
                "version of torchvision that fits your torch."
            ) from None

        path = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
        if not path.is_file():
            raise UserError(f"measures: {path} is missing; download {SOURCE} (96 MB) to this path.")

        # torch-fidelity unpickles whatever the file holds; it is given a copy with the tensors only. The file may be in
        # the format that torch wrote before 2020, which the loaders refuse.
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "inception.pth"
                torch.save(dict(state), copy)

                layers = ["2048", "logits_unbiased"]
                net = package.FeatureExtractorInceptionV3("inception-v3-compat", layers, str(copy))
        except Exception as e:  # a damaged file can raise any exception
            raise UserError(
                f"measures: {path.name} cannot be read or holds a different network ({first_line(e)}); download "
                f"{SOURCE} again."
            ) from None

        self._net = net.eval().to(device)
        self._device = device

    @torch.no_grad()
    def __call__(self, parts: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Features float32 [N, D] of images uint8 [n, H, W, 3] that come in parts, and logits [N, C]."""
        all_features = []
        all_logits = []
        for part in parts:
            for pictures in torch.from_numpy(np.ascontiguousarray(part)).split(_BATCH):
                features, logits = self._net(pictures.permute(0, 3, 1, 2).contiguous().to(self._device))
                all_features.append(features.float().cpu().numpy())
                all_logits.append(logits.float().cpu().numpy())

        return np.concatenate(all_features), np.concatenate(all_logits)


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
            f"reference: {path.name} is not an npz file with images (arr_0) or statistics (mu, sigma) "
            f"({first_line(e)}); give such a file."
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
        raise ValueError(f"mu and sigma do not have the shapes for the {_FEATURES} features of Inception")
    if not all(part.dtype.kind == "f" and np.isfinite(part).all() for part in (mean, covariance)):
        raise ValueError("mu or sigma has values that are not finite")


def resized(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Images uint8 [n, H, W, 3] at another height and width: bicubic without antialiasing, as LlamaGen does."""
    if pictures.shape[1:3] == size:
        return pictures

    planes = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    scaled = F.interpolate(planes, size=size, mode="bicubic")

    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
