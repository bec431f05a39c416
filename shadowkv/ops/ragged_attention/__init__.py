"""Prefill attention of new sequences that are packed one after the other."""
