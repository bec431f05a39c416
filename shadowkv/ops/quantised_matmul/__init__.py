"""Multiplies by quantised weights, which keep the format of a model's files, and dequantises their rows to float32."""
