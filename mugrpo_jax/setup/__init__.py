"""Make the objects of a run from its config: model, tokenizer, device mesh, and derived sizes."""
