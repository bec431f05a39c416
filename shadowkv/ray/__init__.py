"""Many engines on one Ray cluster. Within this package ``import ray`` is the library: imports are absolute."""
