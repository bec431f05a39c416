"""Weights as checkpoints store them: safetensors, quantised or not, and LoRA adapters."""
