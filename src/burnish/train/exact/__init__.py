"""The packed forward with the engine's kernels: log-probs of the same bits as those sampled."""
