"""Runs several decoder layers of a decode step in one call. The layers attend to exact pages."""
