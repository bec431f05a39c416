"""Keys and values of a block of a prompt, kept before and after RoPE."""
