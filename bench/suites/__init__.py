"""Benchmark suites: the measurements of each group of performance targets."""
