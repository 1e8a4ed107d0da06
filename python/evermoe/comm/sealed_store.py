"""A store of torch's rendezvous whose values only members with the job's secret can set."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from evermoe._native import Secret

TAG_BYTES = 32


class SealedStore(dist.Store):
    """Another store, in which each value is preceded by a tag of its key and itself.

    The store's server does not know the secret: whoever reaches it can still remove or withhold values.

    Args:
        store: the one that all members share.
        secret: the job's.
    """

    def __init__(self, store: dist.Store, secret: Secret) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Stores a value."""
        tag = self._secret.tag("store", [key.encode(), value])
        self._store.set(key, tag + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The key's value, once it is there.

        Raises:
            RuntimeError: it was not stored by a member that has the secret.
        """
        found = self._store.get(key)
        tag, value = found[:TAG_BYTES], found[TAG_BYTES:]
        if not self._secret.is_tag(tag, "store", [key.encode(), value]):
            raise RuntimeError(f"{key!r} in a store of torch's is not from a member with this job's secret")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        """The sum of all that was added: a number, which nobody vouches for."""
        return self._store.add(key, value)

    def delete_key(self, key: str) -> bool:
        """Removes a key; whether it was there."""
        return self._store.delete_key(key)
