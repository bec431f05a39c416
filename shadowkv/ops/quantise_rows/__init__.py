"""Rows as codes of 4, 3 or 2 bits, into pages."""

MOST_DIMS = 128
"""Of rows that a kernel multiplies by their codec's rotation: wider ones do not fit into shared memory beside them."""
