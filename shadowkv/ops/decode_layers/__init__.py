"""Runs the decoder layers of a decode step in one call, with attention to exact pages."""
