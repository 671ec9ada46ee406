"""Models as files: what a GGUF is, synthetic ones, and the embedded demo pair."""
