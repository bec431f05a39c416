"""Suites of tasks, which make the samples."""
