"""What the training commands do unasked. Nothing here imports torch, so that --help answers at once."""

FEATURES = "last"
BATCH_SIZE = 8
SEQ_LEN = 256
UNROLL = 5
LR = 4e-3
SEED = 0
LOSS_VOCAB = 8192
EXIT_LR = 2e-3
