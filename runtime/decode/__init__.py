"""The decoding loop and the parts that the CPU and GPU implementations share."""
