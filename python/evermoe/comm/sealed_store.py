"""A store for torch's rendezvous whose values only members with the job's secret can set."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from evermoe._native import Secret

TAG_BYTES = 32


class SealedStore(dist.Store):
    """A wrapper of a store that prefixes each value with an authentication tag of key and value.

    The store's server does not know the secret, so a process that reaches it can still remove or withhold values.

    Args:
        store: the store that all members share.
        secret: the job's secret.
    """

    def __init__(self, store: dist.Store, secret: Secret) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store a value."""
        tag = self._secret.tag("store", [key.encode(), value])
        self._store.set(key, tag + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for the key, and return its value.

        Raises:
            RuntimeError: the value was stored without the secret.
        """
        found = self._store.get(key)
        tag, value = found[:TAG_BYTES], found[TAG_BYTES:]
        if not self._secret.is_tag(tag, "store", [key.encode(), value]):
            raise RuntimeError(f"the value of {key!r} in torch's store was not set by a member with this job's secret")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        """Add to the key's number and return the sum, which is not authenticated."""
        return self._store.add(key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return self._store.delete_key(key)
