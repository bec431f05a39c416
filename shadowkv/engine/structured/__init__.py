"""Structured outputs: answers that follow a JSON schema or a grammar"""
