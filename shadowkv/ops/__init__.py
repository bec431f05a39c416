"""The engine's operations. Each op, or a group of small ones, has a folder with one file per backend. All backends of
an op have the signatures of its ``reference.py``. ``registry.Ops`` chooses a backend for each op when an engine is
loaded."""
