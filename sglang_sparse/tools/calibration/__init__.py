"""The parts of `sglang_sparse.calibrate`: a model's attention, layer by layer, and each method's measurements."""
