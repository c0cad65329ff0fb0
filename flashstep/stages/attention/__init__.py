"""Attention: low-rank query, one latent as key and value, window and chosen compressed entries, grouped output."""
