"""Suites of tasks: where their samples come from."""
