"""Generated text in nine workloads; `mixture` is the way in."""
