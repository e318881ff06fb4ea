"""Skip-Softmax: the prefill method, the decode method, and what a calibration says of a checkpoint."""
