"""Layers with several residual streams: hyper-connections, and the n-gram embeddings that are added to all streams."""
