"""Layer 4: environments, tools, verifiers and rewards."""
