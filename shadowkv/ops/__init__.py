"""The engine's operations: one folder each, one file per backend, one signature; chosen once by ``registry.Ops``."""
