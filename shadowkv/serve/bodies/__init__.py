"""Request bodies: read off the event loop, parsed strictly and checked within limits, without PyTorch."""
