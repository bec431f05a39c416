"""What runs the model over batches: prefill, decode steps, their CUDA graphs, and the choice of tokens"""
