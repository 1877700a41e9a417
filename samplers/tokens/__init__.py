"""Samplers of discrete tokens: LlamaGen first (``llamagen.py``), then PAR, ZipAR, Tar, Jacobi decoding and MuLo-SD."""
