"""Native CPU kernels of the decoder, each beside the PyTorch operators that it replaces."""
