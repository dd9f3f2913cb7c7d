"""How domains learn under a policy, without a model."""
