"""Benchmarks of kernels and of whole engines. Each module is a command: ``python -m benchmarks.FOLDER.NAME``."""
