"""Benchmark harness: targets, records, machine limits, model shapes, server and engine runs."""
