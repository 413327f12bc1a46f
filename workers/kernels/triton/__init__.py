"""Layer functions on CUDA by Triton kernels of our own. Only modules with a ``_kernel`` at their end import Triton."""
