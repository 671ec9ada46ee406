"""What is fastest: cells, their measurement, their store, the winner."""
