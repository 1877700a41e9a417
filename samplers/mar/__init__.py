"""Samplers for masked models of continuous tokens: MAR, and GtR, LazyMAR, FastHybrid and CSpD.

The files in reading order:

- ``settings.py``: the settings of MAR, and the settings that the other samplers share with MAR;
- ``schedule.py``, ``order.py``: which tokens each AR step (pass) decides;
- ``conditions.py``: how the network reads a condition;
- ``tokens.py``, ``tables.py``, ``canvas.py``: the images, their tokens, and the steps of a token's diffusion;
- ``transformer.py``: the look, which computes a condition for each token;
- ``diffusion.py``: the draw, which samples tokens from their conditions;
- ``mar.py``: the sampler MAR;
- ``gtr/``: GtR decides the tokens on one colour of a checkerboard in many AR steps, and then all other tokens in one or
  two AR steps;
- ``lazy/``: LazyMAR reuses features of earlier AR steps, in a sampler of its own or in the other samplers;
- ``fasthybrid/``: FastHybrid drafts later tokens, and refines the drafts in a few diffusion steps;
- ``cspd/``: CSpD drafts tokens with a small model, and verifies the drafts with a large model.
"""
