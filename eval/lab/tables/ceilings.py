"""What the memory and the tensor cores of a chip deliver at best."""

# GB (10^9 bytes) a second, as the vendor says, by what the driver calls the device.
CEILING_GBPS = {"NVIDIA H200": 4800}
# 10^12 floating-point operations a second in dense bfloat16, as measured: what the vendor says, 989, is a quarter more
# than the chip was seen to deliver, so that a share of it would not say how much is left.
CEILING_TFLOPS = {"NVIDIA H200": 790}
# The same in dense float8, as the vendor says: what the chip delivers of it was not measured.
CEILING_FP8_TFLOPS = {"NVIDIA H200": 1979}
