"""Load models from Hugging Face folders, GGUF files or the Hub, and save Hugging Face folders."""
