"""Request bodies: read off the event loop, parsed strictly and checked against limits, without PyTorch."""
