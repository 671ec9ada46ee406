"""The machine: devices, their memory, and a sampler that watches them."""
