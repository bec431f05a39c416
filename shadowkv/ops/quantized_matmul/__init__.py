"""Multiplies by quantized weights, which keep the format of a model's files, and dequantizes their rows to float32."""
