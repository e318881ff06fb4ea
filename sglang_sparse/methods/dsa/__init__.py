"""DSA: the method, the weights of its indexer, and the kernels that it runs."""
