"""From a config to the objects of a run: model, tokenizer, devices, and the sizes derived from them."""
