"""Layer 8: reports and views; reads the store and nothing else."""
