"""Model files: finding them, reading what they describe, and their tokenizer. Safetensors and GGUF only; no torch."""
