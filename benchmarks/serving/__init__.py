"""Servers, ours and a peer's, under the same arrivals: what clients see, and what our engine does without a server."""
