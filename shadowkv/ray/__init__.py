"""Many engines on one Ray cluster. In here ``import ray`` is the library: imports are absolute."""
