"""Runs several decoder layers of a decode step in one call. They attend to exact pages."""
