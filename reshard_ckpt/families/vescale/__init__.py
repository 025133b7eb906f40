"""veScale: its folders of 2024, its DTensors and optimizers, told by attributes, and the calls of its vescale.checkpoint."""
