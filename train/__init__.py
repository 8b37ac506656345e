"""Training of drafters."""
