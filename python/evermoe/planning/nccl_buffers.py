"""Device memory of NCCL's buffers, which it takes when members first exchange tokens.

The sizes are those of NCCL 2.30.7's source, for GPUs that NVSwitch connects and one network card of 400 Gb/s for each
GPU, such as nodes of eight H100 or H200. NCCL 2.28.9 differs in one: with several nodes it takes up to 2 channels to a
GPU. They have not been measured on several GPUs. The trees and the NVLS buffers of an all-reduce are not included.
`NCCL_BUFFSIZE`, `NCCL_LL128_BUFFSIZE` and `NCCL_MAX_P2P_NCHANNELS` reduce what this module counts.
"""

from __future__ import annotations

CONNECTION_BYTES = 12 << 20
"""Of a channel from and to a GPU of the same node (`transport/p2p.cc`): received data of the protocols LL (512 KiB),
LL128 (4.7 MiB) and Simple (4 MiB; all from `init.cc`), rounded up to 10 MiB, and the sender's part, 2 MiB."""
CHANNELS = 32
"""Channels for sends and receives: the 24 of a ring among H100s, rounded up to a power of two (`graph/paths.cc`)."""
NETWORK_CHANNELS = 4
"""Channels to a GPU if there is one on another node: 50 GB/s at 14 GB/s a channel, up to a power of two
(`graph/paths.cc`)."""
PEERS_AT_ONCE = 8
"""Peers of a batch of sends (`NCCL_MAX_DEV_WORK_P2P_PER_BATCH` in `include/device.h`)."""
NETWORK_POOL_BYTES = 2 * CHANNELS * 16 * (128 << 10)
"""Buffers of all GPUs of other nodes together: one for sends and one for receives, of 16 steps of 128 KiB for each
channel (`transport/net.cc`, `init.cc`)."""


def nccl_bytes(workers: int, workers_per_node: int) -> int:
    """Return the bytes that one communicator takes of the memory of a GPU.

    GPUs of the same node have buffers each, as an all-to-all connects all of them; those of other nodes share a pool.

    >>> [nccl_bytes(workers, 8) >> 20 for workers in (1, 8, 64, 256)]
    [0, 3072, 848, 596]

    Args:
        workers: members of the communicator, each with a GPU of its own.
        workers_per_node: of them, how many are on a node.
    """
    if workers == 1:
        return 0
    local = min(workers, workers_per_node) - 1
    ring = CHANNELS * CONNECTION_BYTES
    if workers <= workers_per_node:
        return ring + local * CHANNELS * CONNECTION_BYTES
    channels = NETWORK_CHANNELS
    while channels > 1 and channels * -(-workers // PEERS_AT_ONCE) > CHANNELS:
        channels //= 2
    return ring + local * channels * CONNECTION_BYTES + NETWORK_POOL_BYTES
