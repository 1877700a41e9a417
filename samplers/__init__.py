"""Samplers: a model and a condition become latents and a report.

``engine.py`` comes first: the canvas, the step and the loop. Then a folder for each kind of model: ``mar/`` (masked
tokens), ``tokens/`` (discrete tokens), ``blocks/`` (BitDance) and ``nextstep/``. Models with a diffusion head share
``chain.py``, ``speculation.py``, ``coupling.py`` and ``annealing.py``.
"""
