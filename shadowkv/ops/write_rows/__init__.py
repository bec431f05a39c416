"""Rows of tokens into pages, head by head."""
