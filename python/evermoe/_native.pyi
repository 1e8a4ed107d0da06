"""The compiled extension module."""

# ---- ops: src/python/ops.rs -------------------------------------------------------------------

def register_ops() -> None: ...
def has_cuda_kernels() -> bool: ...

# ---- end of ops -------------------------------------------------------------------------------
