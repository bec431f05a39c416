"""Running an evaluation: every policy answers every sample, by a model in this process or a server."""
