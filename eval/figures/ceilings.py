"""What the memory of a chip delivers at best."""

# GB (10^9 bytes) a second, as the vendor says, by what the driver calls the device.
CEILING_GBPS = {"NVIDIA H200": 4800}
