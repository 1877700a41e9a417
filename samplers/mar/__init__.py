"""Samplers of masked continuous tokens: MAR first (``mar.py``), then GtR, LazyMAR, FastHybrid and CSpD."""
