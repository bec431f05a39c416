"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): a process for every device of one host.

Rank 0 is the engine: it alone has requests, schedules and chooses tokens. What its cache and its runner do, it tells
the other ranks, which do the same with their part of the model, in the same order.
"""
