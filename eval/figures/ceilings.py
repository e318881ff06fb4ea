"""What the memory and the tensor cores of a chip deliver at best."""

# GB (10^9 bytes) a second, as the vendor says, by what the driver calls the device.
CEILING_GBPS = {"NVIDIA H200": 4800}
# 10^12 floating-point operations a second in dense bfloat16, likewise.
CEILING_TFLOPS = {"NVIDIA H200": 989}
