"""Checkpoint files to models: catalogue and download, safe reading, and one loader module per model family."""
