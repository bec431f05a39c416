"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): one process for each device of one host.

Rank 0 is the engine: it alone has the requests, schedules them, and chooses tokens. It sends the method calls of its
cache and its runner to the other ranks. They make the same calls in the same order on their own caches and runners.
"""
