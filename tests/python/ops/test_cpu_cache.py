"""Results on the CPU take the memory of earlier results that are gone, and of those alone."""

import threading

import pytest
import torch

from evermoe import ops
from evermoe.ops.cache import cpu_cache_bytes, set_cpu_cache_limit

TOKENS, WIDTH = 1024, 1024  # 4 MiB of float32

pytestmark = pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < "2.11", reason="needs torch 2.11")


@pytest.fixture(autouse=True)
def empty_cache():
    set_cpu_cache_limit(0)
    set_cpu_cache_limit(None)
    yield
    set_cpu_cache_limit(None)


def rows(value=1.0):
    """A result of 4 MiB, all of one value."""
    x, slots = torch.full((TOKENS, WIDTH), value), torch.arange(TOKENS)
    return ops.permute(x, slots, slots[:, None])


def test_a_result_takes_the_memory_of_one_that_is_gone():
    first = rows()
    address = first.data_ptr()
    del first
    assert cpu_cache_bytes() == 4 << 20
    second = rows(2.0)
    assert second.data_ptr() == address
    assert cpu_cache_bytes() == 0
    assert bool((second == 2).all())


def test_memory_in_use_is_left_alone():
    first = rows(1.0)
    view, detached = first[5:7], first.detach().view(-1)
    del first
    others = [rows(float(value)) for value in range(2, 5)]
    assert len({tensor.data_ptr() for tensor in [detached, *others]}) == 4
    assert bool((view == 1).all())
    assert bool((detached == 1).all())


def test_memory_that_autograd_keeps_is_left_alone():
    x = torch.full((TOKENS, WIDTH), 3.0, requires_grad=True)
    slots = torch.arange(TOKENS)
    result = ops.permute(x * 1, slots, slots[:, None]).square().sum()
    for value in range(3):
        rows(float(value))
    result.backward()
    assert bool((x.grad == 6).all())


def test_a_limit_holds_and_frees():
    kept = [rows() for _ in range(3)]
    del kept
    assert cpu_cache_bytes() == 12 << 20
    set_cpu_cache_limit(5 << 20)
    assert cpu_cache_bytes() == 4 << 20
    set_cpu_cache_limit(0)
    assert cpu_cache_bytes() == 0
    rows()
    assert cpu_cache_bytes() == 0
    with pytest.raises(OverflowError):
        set_cpu_cache_limit(-1)


def test_small_results_are_not_kept():
    small = ops.permute(torch.ones(8, 8), torch.arange(8), torch.arange(8)[:, None])
    del small
    assert cpu_cache_bytes() == 0


def test_results_may_die_on_other_threads():
    def work(value):
        for _ in range(20):
            assert bool((rows(value) == value).all())

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < cpu_cache_bytes() <= 16 << 20


def test_a_result_can_be_saved_shared_and_resized(tmp_path):
    result = rows(7.0)
    torch.save(result, tmp_path / "result")
    assert torch.equal(torch.load(tmp_path / "result"), result)
    assert torch.equal(result.clone().resize_(10), torch.full((10,), 7.0))
    result.share_memory_()
    assert bool((result == 7).all())
    assert cpu_cache_bytes() == 4 << 20, "shared memory took its place"
