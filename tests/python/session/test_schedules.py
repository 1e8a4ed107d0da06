"""Random schedules of failures, one for each preset; `make test-failures` has hundreds."""

import pytest

from support import schedules


@pytest.mark.parametrize("seed", range(6))
def test_schedule(tmp_path, seed):
    schedules.run(seed, tmp_path)
