"""Start of an engine: loads the model, sizes and builds the KV cache and the prefix cache"""
