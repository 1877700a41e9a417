"""What the authors of this pack run: sweeps, experiments, training, recordings, figures of the docs, release.

Part of a checkout only.
"""
