"""Selects the chunks with the largest softmax shares for each sequence and kv head."""
