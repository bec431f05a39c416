"""Copies a prompt block's keys and values, and its keys after RoPE, to where prefill keeps them."""
