"""The comparison behind `specdec bench`: methods on the same prompts, interleaved, tokens compared."""
