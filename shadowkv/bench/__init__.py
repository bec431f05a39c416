"""Benchmarks of servers, this one or others, as a client sees them: ``shadowkv bench``."""
