"""Tools that prove an acceptance rule lossless: enumeration, chi-square, toy models, biased variants."""
