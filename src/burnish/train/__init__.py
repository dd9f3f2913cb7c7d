"""Layer 5: losses, advantages, packing, optimizer, checkpoints."""
