"""Benchmarks that measure on the device what users wait for."""
