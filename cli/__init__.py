"""Command line: one file per command, without ComfyUI."""
