"""Selected chunks from host memory, through a buffer on the device that keeps the most recently used ones."""
