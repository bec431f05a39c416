"""Prefill attention of new sequences that are packed one behind the other."""
