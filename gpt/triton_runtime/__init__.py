"""Triton kernels in this process: the check that Triton works, and reports of compilations."""
