"""What a response's trace says it took."""

import numpy as np
import pytest

from dgr2_jax.evaluation import responses


@pytest.mark.parametrize('call, begin, forwards', [
    ([0, 1, 2, 3], 1, 3),  # AR: one a token
    ([0, 2, 1, 1, 3, 4], 3, 3),  # blocks: forwards 1, 3 and 4
    ([0, 2, 2, 2, 4, 4], 4, 2),  # verified: a draft and a verification
    ([0, 2, 2, 2, 4, 4], 0, 5),  # all of it: the prefill too
    ([0, 1], 2, 0),  # no answer
])
def test_forwards_of_a_span(call, begin, forwards):
  assert responses.forwards_of(np.array(call), begin) == forwards
