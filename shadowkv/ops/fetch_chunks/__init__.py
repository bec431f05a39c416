"""Fetches selected chunks from host memory into a buffer on the device, which keeps the most recently used ones."""
