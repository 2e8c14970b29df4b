"""Tools that prove an acceptance rule lossless: exact enumeration, chi-square, toy models, known biased variants."""
