"""Layer 3: isolated execution of model-written code."""
