"""Whole engines: prefill, decode, mixed load, several GPUs, policies side by side, CPUs."""
