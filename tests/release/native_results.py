"""Loads the extension module of an unpacked wheel, without torch, and prints results that no platform may change."""

import glob
import importlib.util
import sys

import numpy as np

[file] = glob.glob(sys.argv[1] + "/evermoe/_native*.so")
spec = importlib.util.spec_from_file_location("_native", file)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)

random = np.random.default_rng(0)
load = random.random(16)
replicas = native.allocate(load, 4, 8, 1)
print("kernels", native.has_cuda_kernels())
print("digest", native.digest(random.integers(0, 256, 100_003, dtype=np.uint8)))
print("replicas", replicas.tolist())
print("placement", native.place(replicas, 4, 8, "balanced", load, None, None, 1)[0].tolist())
print("copies", native.copy_holders(["a", "a", "b", "b"], 1, "ring"))
print("shares", native.shard_modules([100, 2_000, 30], [7, 7, 9], 4))
