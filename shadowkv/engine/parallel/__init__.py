"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): one process for each device of one host.

Rank 0 is the engine: only it has requests, schedules and chooses tokens. It sends the calls of its cache and its runner
to the other ranks, which make the same calls on their parts of the model, in the same order.
"""
