"""Load generation against a running server, and the report of latency and throughput."""
