"""Adds learned sinks to partial attention, and merges partial attentions over disjoint sets of tokens."""
