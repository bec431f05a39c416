"""Writes one new token per sequence into its exact page."""
