"""Layer 9: the verbs. Each is a thin function over the layers below."""
