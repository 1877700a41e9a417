"""ComfyUI's folders: model files, images of the input folder, results of the output folder."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import folder_paths

from ...errors import UserError
from ...reports.exchange import ENDINGS
from ...reports.files import expect_name, writable

FOLDER = "fastar"
EXTENSIONS = {".safetensors", ".pth", ".pt", ".ckpt", ".bin"}


def register_folders() -> None:
    """Register ``models/fastar`` with ComfyUI, and create it, so a user can see where files belong."""
    folder = os.path.join(folder_paths.models_dir, FOLDER)
    folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)

    with suppress(OSError):  # a folder that is read-only may still hold files
        os.makedirs(folder, exist_ok=True)

    _, extensions = folder_paths.folder_names_and_paths[FOLDER]
    if extensions is not folder_paths.supported_pt_extensions:  # shared with ComfyUI's folders: must not change
        extensions.update(EXTENSIONS)


def local_files(*kinds: str) -> list[str]:
    """Names of the weight files in model folders, as in ComfyUI's menus."""
    names: list[str] = []
    for kind in kinds:
        names += folder_paths.get_filename_list(kind)
    return names


def paths(*kinds: str) -> list[Path]:
    """Directories of model folders."""
    paths: list[Path] = []
    for kind in kinds:
        paths += [Path(path) for path in folder_paths.get_folder_paths(kind)]
    return paths


SWEEPS = "fastar_sweeps"
_LONGEST_PATH = 4096
_NOT_ON_WINDOWS = frozenset('<>:"|?*')


def input_images() -> list[str]:
    """Names of the files in ComfyUI's input folder that may hold a report."""
    folder = Path(folder_paths.get_input_directory())
    if not folder.is_dir():
        return []

    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in ENDINGS)


def input_image(name: str) -> Path:
    """The file of an image in the input folder, or in the folder that the name ends with ("[output]", say)."""
    places = (
        folder_paths.get_input_directory(),
        folder_paths.get_output_directory(),
        folder_paths.get_temp_directory(),
    )

    try:
        path = Path(os.path.abspath(folder_paths.get_annotated_filepath(name[:_LONGEST_PATH])))
        # Not all supported versions of ComfyUI check that the name stays inside the folder.
        inside = any(path.is_relative_to(os.path.abspath(place)) for place in places)
        found = inside and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        found = False

    if not found:
        raise UserError(
            f"image: there is no image {name[:80]!r} in ComfyUI's folders; upload the image, or choose a different one."
        )
    return path


def sweep_folder(name: str) -> Path:
    """The folder of a sweep's cells; it is not created."""
    return Path(folder_paths.get_output_directory()) / SWEEPS / name


def expect_writable(prefix: str, ending: str, field: str) -> None:
    """Check, before the work, that a file with this prefix can be saved in the output folder.

    ComfyUI reports it after the work. It replaces %year%, %width% and their like when it saves; the editor replaces
    %date:...% and %Node.widget% before it sends the prompt, and a program that sends them gets them in the name.

    Raises:
        UserError: a name that no file can have, one outside the folder, or a folder that is read-only or full.
    """
    folder = os.path.realpath(folder_paths.get_output_directory())
    expect_name(prefix, field)

    # A colon would give an empty file with a hidden stream that holds the content.
    if sys.platform == "win32" and not _NOT_ON_WINDOWS.isdisjoint(prefix):
        raise UserError(
            f"{field}: {prefix[:80]!a} has at least one of the characters {' '.join(sorted(_NOT_ON_WINDOWS))}, which "
            "Windows does not allow in file names; leave these characters out. Only ComfyUI's editor turns %date:...% "
            "into a date; write %year%-%month%-%day% instead."
        )

    path = Path(os.path.realpath(os.path.join(folder, os.path.normpath(prefix))))
    if not path.is_relative_to(folder) or path == Path(folder):
        raise UserError(
            f"{field}: {prefix[:80]!r} is not inside the output folder; give a name without '..', without a drive and "
            "without a leading slash."
        )

    writable(path.parent, field, f"{path.name}_00001_{ending}")


def t5_tokenizer() -> Path | None:
    """Folder of the T5 tokenizer that ships with ComfyUI; it is the same for all T5 and Flan-T5 sizes."""
    folder = Path(folder_paths.__file__).parent / "comfy" / "text_encoders" / "t5_tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None
