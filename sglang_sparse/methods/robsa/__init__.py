"""RoBSA: the method, and the calibration that it goes by."""
