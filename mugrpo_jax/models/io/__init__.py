"""Models in and out: Hugging Face folders, safetensors, GGUF, known names."""
