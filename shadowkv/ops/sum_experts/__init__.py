"""Sums the results of a token's experts by their weights."""
