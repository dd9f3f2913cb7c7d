"""Layer 4: environments. A task is data; an environment turns it into an episode and a verdict."""
