"""Decoder layers of a decode step, with exact attention, in one call."""
