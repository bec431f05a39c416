"""Merges partial attentions over disjoint sets of tokens."""
