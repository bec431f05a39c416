"""Adds learned sinks to a part of an attention: a position of every softmax whose value is nothing."""
