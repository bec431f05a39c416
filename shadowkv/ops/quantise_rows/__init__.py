"""Rows as codes of 4, 3 or 2 bits, into pages."""
