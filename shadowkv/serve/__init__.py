"""The HTTP server and the batch mode: ``shadowkv serve``."""
