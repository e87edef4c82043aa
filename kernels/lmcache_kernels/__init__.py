"""Tensor operations on paged KV caches: tensors in, tensors out, no files.

May import torch, and triton in `*/kernel.py` alone. Knows neither the format nor the store.
"""
