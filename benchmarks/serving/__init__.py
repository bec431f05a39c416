"""Our server and vLLM's under the same arrivals of requests: the times that clients see, and those of our engine
without a server."""
