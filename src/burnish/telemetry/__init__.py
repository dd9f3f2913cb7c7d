"""Layer 1: declared metrics and events."""
