"""Another engine, in the columns of the sweeps' files."""
