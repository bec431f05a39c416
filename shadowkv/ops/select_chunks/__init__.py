"""The best chunks of each sequence and kv head."""
