"""The rollout and training pipeline as a discrete-event simulation."""
