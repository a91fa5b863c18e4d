"""One replica: an admission gate, a reconciler, and the ASGI middleware in front of the engine."""
