"""Checkpoints: their files, read within limits, weights in safetensors, quantised or not, and LoRA adapters."""
