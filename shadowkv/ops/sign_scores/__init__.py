"""Scores runs of 8 tokens by the signs of a 2-bit key sketch."""
