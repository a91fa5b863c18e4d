"""For tests and benchmarks: a real server, a proxy with faults, a small server with bad manners."""
