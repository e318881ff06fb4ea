"""What `sglang_sparse.calibrate` is made of: a model's attention, layer by layer, and what a method makes of it."""
