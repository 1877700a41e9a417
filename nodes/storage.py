"""Interface to ComfyUI's folders of pictures: the input folder, and the folders of sweeps in the output and input folders.

Beside host.py the only module that imports ``folder_paths``.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..errors import UserError

SWEEPS = "fastar_sweeps"
_ENDINGS = (".png",)


def input_pictures() -> list[str]:
    """Names of the PNG files in ComfyUI's input folder."""
    folder = Path(folder_paths.get_input_directory())
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _ENDINGS) if folder.is_dir() else []


def input_picture(name: str) -> Path:
    """The file of a picture in the input folder, or in the folder that the name ends with ("[output]", say).

    Raises:
        UserError: there is no such file, or the name leads out of these folders.
    """
    try:
        path = Path(folder_paths.get_annotated_filepath(name))
    except ValueError:
        path = Path()
    if not folder_paths.exists_annotated_filepath(name) or not path.is_file():
        raise UserError(f"image: there is no picture {name!r} in ComfyUI's input folder; upload or choose one.")
    return path


def sweep_folder(name: str) -> Path:
    """The folder of a sweep's cells; it is not created."""
    return Path(folder_paths.get_output_directory()) / SWEEPS / name


def drawn_sweep(name: str) -> Path:
    """The folder of a sweep of the command line, inside the output or the input folder.

    Raises:
        UserError: there is none, or the name leads out of these folders.
    """
    for base in (folder_paths.get_output_directory(), folder_paths.get_input_directory()) if name.strip() else ():
        root = Path(base).resolve()
        try:
            path = (root / name.strip()).resolve()
            if path.is_relative_to(root) and path != root and path.is_dir():
                return path
        except (OSError, ValueError):  # a name that no file can have
            break
    raise UserError(
        f"folder: there is no folder {name!r} in ComfyUI's output or input folder; name one that the command sweep wrote there."
    )
