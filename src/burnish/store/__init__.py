"""Layer 2: the run directory and everything that persists in it."""
