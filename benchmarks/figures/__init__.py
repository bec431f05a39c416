"""Tables, single figures and plots of README.md and docs/, written from benchmarks/results."""
