"""Samplers of discrete tokens: LlamaGen, PAR, ZipAR, Tar, Jacobi decoding and MuLo-SD.

The files in reading order:

- ``settings.py``, ``defaults.py``, ``edit_settings.py``: what a user can set, and the published values;
- ``checks.py``, ``prepare.py``: whether model, settings and condition fit together, and the condition in tensors;
- ``canvas.py``: the images of a run and their tokens so far;
- ``schedule.py``: which cells each pass decides, and which tokens it feeds;
- ``cache_slots.py``: which slot of the KV cache holds each fed token;
- ``device_table.py``: both in tensors on the device;
- ``looks.py``: the transformer with its KV cache;
- ``token_noise.py``, ``sampling.py``: from the transformer's output to tokens;
- ``llamagen.py``: one token per pass, and the function that runs every schedule that is known before the first pass;
- ``zipar.py``, ``par.py``, ``tar.py``: samplers with schedules of their own, and Tar's first stage;
- ``jacobi.py``: several passes in one call of the transformer;
- ``mulosd/``: a draft at low resolution, which a larger model verifies and repairs.
"""
