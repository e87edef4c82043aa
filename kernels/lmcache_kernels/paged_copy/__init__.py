"""What `gather_paged` and `scatter_paged` launch on a device: one kernel that copies between pages and a chunk.

`kernel.py` is the only module; it imports triton.
"""
