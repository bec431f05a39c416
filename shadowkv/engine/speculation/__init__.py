"""Speculative decoding: drafts of several tokens, which the model verifies in one step, and the gate that decides how
many tokens to draft"""
