"""Generated text in seven workloads; `mixture` is the way in."""
