"""Layer 7: what would happen; simulators that drive the objects of the real run."""
