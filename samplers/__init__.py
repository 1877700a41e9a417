"""Samplers: each turns a model and a condition into latents or token codes, and writes a report.

Read ``engine.py`` first: it has the canvas, the step and the loop. Each kind of model has a folder: ``mar/`` (masked
tokens), ``tokens/`` (discrete tokens), ``blocks/`` (BitDance) and ``nextstep/`` (NextStep). The samplers of models with
a diffusion head share ``chain.py``, ``speculation.py``, ``coupling.py`` and ``annealing.py``.
"""
