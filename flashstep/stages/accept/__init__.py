"""Sampling and acceptance: logits become distributions, drafts are judged against them, tokens are delivered."""
