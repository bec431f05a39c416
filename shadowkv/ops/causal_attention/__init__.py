"""Prefill attention of a run of queries over everything up to them."""
