"""Load and save models: Hugging Face folders, safetensors, GGUF, models by name."""
