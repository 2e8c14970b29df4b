"""Training in plain PyTorch: `python -m specdec.training.pretrain` makes a model from a folder of text."""
