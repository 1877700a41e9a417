"""Files to modules: safe reading (``checkpoint``), catalogue and download (``hub``, ``download``), one file per family.

Nothing happens at import. This room knows files and networks; it does not know sampling, ComfyUI or the command line.
"""
