"""Engram: hashed n-gram tables whose rows join the residual copies at a few layers."""
