"""Interface to ComfyUI, one file a subject.

The only part of the pack that imports ``comfy.*`` or ``folder_paths``. It handles networks and images of any family.
"""

from . import devices, folders, images, loaded, memory, operations, progress, queue, server, text

__all__ = [
    "devices",
    "folders",
    "images",
    "loaded",
    "memory",
    "operations",
    "progress",
    "queue",
    "server",
    "text",
]
