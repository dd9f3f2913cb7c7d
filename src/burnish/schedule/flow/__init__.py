"""How much to start and in which order: engine load, durations, resources, rounds."""
