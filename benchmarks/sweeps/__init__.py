"""Benchmarks of whole engines: prefill, decode, mixed load, several GPUs, comparisons of policies, and CPUs."""
