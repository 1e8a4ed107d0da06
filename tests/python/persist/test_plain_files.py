"""Files of tensors: what safetensors itself would write, on disk at once, or none."""

import os
import resource

import pytest
import torch
from safetensors.torch import load_file, save

from evermoe.checkpoint.plain_files import _DTYPES, write_tensors, write_units
from evermoe.errors import UnsupportedState
from evermoe.state.unit import TensorSpec, Unit, digests_of
from support import disks


def make(dtype, *shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    return data.view(dtype).reshape(shape)


def test_a_file_has_the_bytes_that_safetensors_gives_it(tmp_path):
    tensors = {f"{dtype}/{at}": make(dtype, *shape) for dtype in _DTYPES for at, shape in enumerate([(), (0,), (3, 5)])}
    tensors["transposed"] = make(torch.float32, 4, 6).t()
    apart = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name, metadata in (("without", None), ("with", {"format": "pt"})):
        write_tensors(tmp_path / name, tensors, metadata)
        assert (tmp_path / name).read_bytes() == save(apart, metadata)
    assert os.stat(tmp_path / "with").st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_units_of_several_blocks_come_back_with_their_digests(tmp_path):
    specs = (TensorSpec("weights", (700_000,), torch.float32), TensorSpec("steps", (1,), torch.int64))
    units = {}
    for name in ("a.experts.0", "a.experts.1", "a.experts.2"):
        data = torch.randint(0, 256, (2_800_008,), dtype=torch.uint8)
        units[name] = Unit(name, specs, "a", int(name[-1])), data
    digests = write_units(tmp_path / "file", units)
    assert list(digests.values()) == digests_of([[data] for _, data in units.values()])
    found = load_file(tmp_path / "file")
    for name, (unit, data) in units.items():
        for key, tensor in unit.tensors(data).items():
            assert torch.equal(found[f"{name}/{key}"].view(torch.uint8), tensor.view(torch.uint8))


def test_dtypes_that_files_have_not_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedState, match=r"odd is of torch.complex128, which safetensors files do not support"):
        write_tensors(tmp_path / "file", {"odd": torch.zeros(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError, match=r"writing .*file"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(1)})
    assert (tmp_path / "file").read_text() == "old"


def test_a_full_disk_is_an_error_that_leaves_no_file(small_disk):
    disks.fill(small_disk)
    with pytest.raises(OSError, match=r"writing .*file.*No space left") as caught:
        write_tensors(small_disk / "file", {"a": torch.zeros(1 << 16)})
    assert caught.value.errno == 28
    disks.free(small_disk)
    assert list(small_disk.iterdir()) == []
    write_tensors(small_disk / "file", {"a": torch.zeros(1 << 16)})


def test_an_error_in_the_middle_leaves_no_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"writing .*file.*too large") as caught:
            write_tensors(tmp_path / "file", {"a": torch.zeros(3 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == 27
    assert list(tmp_path.iterdir()) == []
