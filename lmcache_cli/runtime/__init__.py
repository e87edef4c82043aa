"""What an engine needs to load and save while it serves: buffers, verified loads, background saves.

Knows no engine. May import store, kernels, format and back-ends; torch only in `torch_pages` and `gpu_connector`.
"""
