"""Engines' own caches and hooks, turned into our tensors: one package an engine, and what they share.

May import runtime, store and format. `producer` and `errors` import no engine and no torch.
"""
