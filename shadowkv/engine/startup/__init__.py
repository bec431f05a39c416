"""What an engine is built from when it starts: model, KV cache and prefix cache, and their sizes"""
