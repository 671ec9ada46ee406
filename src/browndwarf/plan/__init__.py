"""What fits: the memory budget, and the quantization that meets it."""
