"""DSA in the model: its indexer, and what attends to the selection."""
