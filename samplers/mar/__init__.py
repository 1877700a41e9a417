"""Samplers for masked models of continuous tokens: MAR, and GtR, LazyMAR, FastHybrid and CSpD.

The files in reading order:

- ``settings.py``: the settings of MAR, and the settings that the other samplers share with MAR;
- ``schedule.py``: how many tokens each AR step (pass) decides;
- ``tables.py``: the steps of a token's diffusion;
- ``canvas.py``: the images, and which tokens each AR step decides; ``prepare.py`` makes both for a run;
- ``transformer.py``: the look, which computes a condition for each token;
- ``mar.py``: the sampler MAR, and the draw, which samples tokens from their conditions;
- ``gtr/``: GtR decides the tokens on one colour of a checkerboard in many AR steps, and then all other tokens in one or
  two AR steps;
- ``lazy/``: LazyMAR reuses features of earlier AR steps, in a sampler of its own or in the other samplers;
- ``fasthybrid/``: FastHybrid drafts later tokens, and refines the drafts in a few diffusion steps;
- ``cspd/``: CSpD drafts tokens with a small model, and verifies the drafts with a large model.
"""
