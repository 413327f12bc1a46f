"""Model files: locating them, reading their descriptions, and their tokenizers. Safetensors and GGUF only; no torch."""
