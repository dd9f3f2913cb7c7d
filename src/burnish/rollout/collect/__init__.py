"""Groups of episodes, with failures classified."""
