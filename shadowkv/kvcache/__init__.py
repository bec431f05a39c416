"""The KV cache: policies and their parts, pages, sequences, prefill and decode"""
