"""The engine's operations. Each op has a folder with one file per backend, all with the signature of ``reference.py``.
``registry.Ops`` chooses a backend of each op when an engine is loaded."""
