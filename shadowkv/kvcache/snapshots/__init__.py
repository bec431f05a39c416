"""Sequences as bytes and back: headers, the layers' bytes, and chains of snapshots."""
