"""Many engines on one Ray cluster. Within this package ``import ray`` is the library, since imports are absolute."""
