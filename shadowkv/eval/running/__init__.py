"""Runs an evaluation: every policy answers every sample, with a model in this process or a server."""
