"""Keys in 8-bit steps of their blocks, by which a sparse prefill chooses blocks."""
