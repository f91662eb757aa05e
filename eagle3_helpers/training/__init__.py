"""Training of the draft on stored hidden states, outside the notebook and resumable."""
