"""Where the ComfyUI of the tests computes: $COMFYUI_DEVICE, "cpu" (the default) or "cuda" for a graphics card."""

import os

NAMED = os.environ.get("COMFYUI_DEVICE") or "cpu"
if NAMED not in ("cpu", "cuda"):
    raise ValueError(f'COMFYUI_DEVICE is {NAMED!r}; it must be "cpu" or "cuda"')

ON_CARD = NAMED == "cuda"
# Of ComfyUI's command line, which takes the card where nothing is said.
OPTIONS = [] if ON_CARD else ["--cpu"]
