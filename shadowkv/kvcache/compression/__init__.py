"""Compression: fits states on exact tokens, and writes the tokens in the policy's form, for prefill and decode"""
