"""Adds learned sinks to partial attention: one more position in every softmax, whose value is zero."""
