"""Output head, Markov head and confidence head."""
