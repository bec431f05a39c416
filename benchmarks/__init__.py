"""What is measured of kernels and of whole engines: one command a module, ``python -m benchmarks.ROOM.NAME``."""
