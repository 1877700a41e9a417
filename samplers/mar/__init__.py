"""Samplers for masked models of continuous tokens: MAR, and GtR, LazyMAR, FastHybrid and CSpD.

The files in reading order:

- ``settings.py``: what a user can set for MAR, and what the other samplers share with it;
- ``schedule.py``, ``order.py``: which tokens each AR step decides;
- ``tokens.py``, ``tables.py``, ``canvas.py``: the images, their tokens, and the steps of a token's diffusion;
- ``transformer.py``: the look, which computes a condition for each token;
- ``diffusion.py``: the draw, which samples tokens from their conditions;
- ``mar.py``: the sampler MAR;
- ``gtr/``: the tokens on one colour of a checkerboard in many AR steps, and the other tokens in one or two;
- ``lazy/``: LazyMAR, which reuses features of earlier AR steps, alone or in the other samplers;
- ``fasthybrid/``: drafts of later tokens, which are refined in a few diffusion steps;
- ``cspd/``: drafts of a small model, which a large model verifies.
"""
