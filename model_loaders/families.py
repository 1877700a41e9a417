"""The families, one line each.

A family is a folder of ``model_loaders/`` with this name, which has a module ``kinds``, and a module of
``runs/families/`` with this name, which has its record. What the pack knows of a family it asks the two; messages list
families in this order.
"""

FAMILIES = (
    "mar",
    "llamagen",
    "tar",
    "hybrid",
    "janus",
    "bitdance",
)
