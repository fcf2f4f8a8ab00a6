"""Benchmarks: suites, a harness and peer engines that measure the performance targets."""
