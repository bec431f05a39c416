"""Copies a prompt block's keys, keys after RoPE, and values to the tensors in which prefill keeps them."""
