"""Speculative decoding: drafts of several tokens from the request's own text, which the model verifies in one step"""
