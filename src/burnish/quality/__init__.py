"""Layer 7: probes of environments and the gate that their verdicts drive."""
