"""Models: configuration, checkpoints, tokenizer, and the implementations that run them."""
