"""Quantised checkpoints: one file for each format, which reads it into the forms that matrices have here."""
