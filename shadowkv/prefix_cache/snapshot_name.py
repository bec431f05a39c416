"""The form of snapshot names, for code that reads them in requests, even without NumPy."""

LINK_BYTES = 20
"""Size of a link in the chain that names are made of (``key.py``)."""

SNAPSHOT_NAME = f"[0-9a-f]{{{2 * LINK_BYTES}}}"
"""Regular expression of a name."""
