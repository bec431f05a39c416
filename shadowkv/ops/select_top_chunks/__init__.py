"""The chunks with the largest softmax shares of each sequence and kv head."""
