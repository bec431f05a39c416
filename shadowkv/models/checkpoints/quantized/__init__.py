"""Quantized checkpoints: one module per format, which reads it into the engine's forms of matrices."""
