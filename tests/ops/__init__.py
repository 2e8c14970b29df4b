"""Tests of the operators. A new backend is one entry in `backends.py`."""
