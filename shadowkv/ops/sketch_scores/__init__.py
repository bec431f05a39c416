"""Scores of chunks by a 2-bit sketch of their keys."""
