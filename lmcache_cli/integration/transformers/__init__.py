"""Hugging Face transformers as an engine: whose KV it is, computing it, and continuing from stored KV.

`model_identity`, `weights_digest` and `prompt_tokens` do without torch and, on a second run, without transformers;
`engine`, `kv_cache` and `reusable_cache` import both. May import the format; knows neither the command line nor the
environment.
"""
