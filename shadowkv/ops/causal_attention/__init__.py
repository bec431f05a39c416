"""Prefill attention of the last queries over everything up to them."""
