"""The gateway: one address in front of every replica. ``docs/http.md`` has its HTTP contract."""
