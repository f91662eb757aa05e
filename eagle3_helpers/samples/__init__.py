"""Conversations to token ids, loss masks and the draft vocabulary."""
