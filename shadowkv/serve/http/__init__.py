"""The HTTP server: connections, middleware, errors, event streams, settings, metrics and traces."""
