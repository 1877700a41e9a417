"""Samplers of discrete tokens: LlamaGen, PAR, ZipAR, Tar, Jacobi decoding and MuLo-SD.

The files in reading order:

- ``settings.py``: what a user can set, and the published values;
- ``checks.py``, ``features.py``, ``prepare.py``: check that model, settings and condition fit together, convert
  semantic codes to features, and pack the condition into tensors;
- ``canvas.py``: the canvas, which holds the tokens of a run's images;
- ``schedule.py``: which cells each pass decides, and which tokens it feeds; the same facts in arrays;
- ``cache_slots.py``: which slot of the KV cache holds each fed token;
- ``token_noise.py``, ``sampling.py``: from the transformer's output to tokens;
- ``looks.py``: the transformer with its KV cache; the prefill, which decides the first cells, and the later passes;
- ``jacobi.py``, ``jacobi_window.py``: several passes in one call of the transformer;
- ``decode.py``: runs any schedule that is known before the first pass;
- ``llamagen.py``, ``zipar.py``, ``par.py``, ``tar.py`` (Tar's first stage): the samplers with such a schedule;
- ``mulosd/``: a model for small images makes a draft, and a model for larger images verifies and corrects it.

The files use these words, besides the words in ``samplers/__init__.py``. ``schedule.py`` and ``cache_slots.py`` have
examples:

=======  =============================================================================================================
place    the index of a token in the order in which a model reads tokens
slot     an entry of the KV cache; it holds the keys and values of one place
fed row  one token that a pass feeds to the transformer
window   in Jacobi decoding, the passes that one call computes together; in ZipAR, the number of cells of a grid row
         that must be decided before the next grid row starts
=======  =============================================================================================================
"""
