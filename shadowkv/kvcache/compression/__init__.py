"""Compression: exact tokens are fitted, coded and written in the policy's form, for prefill and decode"""
