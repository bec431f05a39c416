"""Checkpoints: safe reading of their files, weights in safetensors (plain or quantized), and LoRA adapters."""
