"""Rows of quantised numbers in the blocks of GGUF files, as float32."""
