"""Fetches selected chunks from host memory into a buffer on the device. The buffer keeps the most recently used
chunks."""
