"""The engine's operations. Each op, or a group of small ones, has a folder with one file per backend. All have
the signatures of ``reference.py``. ``registry.Ops`` chooses a backend of each op when an engine is loaded."""
