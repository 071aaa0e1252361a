"""Speculative decoding: who drafts tokens, how many pay, and how the target judges them."""
