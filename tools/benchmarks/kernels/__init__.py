"""What the compiler makes of the Triton kernels, without a GPU."""
