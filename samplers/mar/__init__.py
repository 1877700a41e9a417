"""Samplers for masked models of continuous tokens: MAR (``mar.py``), and GtR, LazyMAR, FastHybrid and CSpD."""
