"""Dequantises rows of GGUF files and quantised checkpoints to float32."""
