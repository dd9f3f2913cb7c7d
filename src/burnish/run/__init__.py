"""Layer 8: the composition root, the only place that builds and wires."""
