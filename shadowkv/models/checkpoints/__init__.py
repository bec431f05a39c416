"""Checkpoints: safe reading of their files, weights in safetensors (plain or quantised), and LoRA adapters."""
