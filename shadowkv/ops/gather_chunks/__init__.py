"""Fetches the rows of selected chunks from where they live."""
