"""Rows of quantised numbers, of GGUF files and of quantised checkpoints, as float32."""
