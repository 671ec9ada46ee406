"""The serving benchmark: load, exact metrics, and the verdict between two servers."""
