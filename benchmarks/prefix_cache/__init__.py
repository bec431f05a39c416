"""Benchmarks of reused prompts: the cost of a hit, the answers after one, what eviction keeps, and stored bytes."""
