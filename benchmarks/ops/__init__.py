"""Kernels by themselves, on a GPU: times, and what the hardware would allow."""
