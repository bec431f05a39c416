"""Copies rows of tokens into pages, which store them by head."""
