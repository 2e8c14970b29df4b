"""Exact, fast speculative decoding for models whose memory is a recurrent state."""

__version__ = "0.1.0"
