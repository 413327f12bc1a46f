"""Write a GGUF file in another of llama.cpp's formats. Run by the Python of its build: FROM TO FORMAT THREADS."""

import ctypes
import sys
from collections.abc import Sequence

from llama_cpp import llama_cpp

_FORMATS = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
}


def main(arguments: Sequence[str]) -> int:
    source, target, name, num_threads = arguments
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = _FORMATS[name]
    parameters.nthread = int(num_threads)
    parameters.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
