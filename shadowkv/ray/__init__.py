"""Many engines on one Ray cluster. In this package, ``import ray`` imports the library, since imports are absolute."""
