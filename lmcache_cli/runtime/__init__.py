"""What an engine needs to load and save while it serves: buffers, verified loads, background saves.

`engine`, `config`, `token_database`, `storage_manager`, `gpu_connector` and `memory` hold the same machinery under the
field's names. Knows no engine. May import store, kernels, format and back-ends; torch only in `torch_pages`.
"""
