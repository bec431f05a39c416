"""Writes the tables, single figures and plots in README.md and docs/ from the files in benchmarks/results."""
