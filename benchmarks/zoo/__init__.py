"""Models of Hugging Face's transformers under plans: see `__main__`."""
