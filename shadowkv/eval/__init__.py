"""Quality evaluations of cache policies: ``shadowkv eval``."""
