"""Layer 6: what to sample next; pure state machines."""
