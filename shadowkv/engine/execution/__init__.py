"""Execution of the model over batches: prefill, decode steps, CUDA graphs, and sampling"""
