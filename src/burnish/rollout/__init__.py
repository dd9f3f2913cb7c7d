"""Layer 5: engine, agent loop and collection of rollouts."""
