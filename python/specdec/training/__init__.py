"""Training in plain PyTorch: `python -m specdec.training.pretrain` makes a model from a folder of text, and
`specdec train-drafter` a drafter for a model.
"""
