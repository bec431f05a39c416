"""Causal prefill attention over selected blocks of keys."""
