"""The live connector for vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMCacheStoreConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "lmcache_cli.integration.vllm.connector", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "/var/cache/kv"}}'

`connector` is thin: `scheduling` decides (one process), `worker` moves (one process a rank), `plan` is what one tells
the other; these three know neither vLLM nor torch. `identity` and `paging` read vLLM's configuration and its pages.
"""
