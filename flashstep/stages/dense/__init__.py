"""Skinny products: every dense weight of the model times a few rows, weights streamed once."""
