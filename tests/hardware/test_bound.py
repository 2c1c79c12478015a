"""Tests of the estimate of a program's time against a computation by hand."""

import pytest

from hbf.hardware.bound import bound
from hbf.hardware.chips import CHIPS
from hbf.hardware.hlo import Collective


def test_each_reason_is_its_amount_over_its_rate():
  found = bound(CHIPS['v5e'], {'bfloat16': 197e12, 'highest': 197e12}, 2 * 819e9)
  assert found == pytest.approx((1 + 6, 2, 0))
  assert (found.seconds, found.limit) == (pytest.approx(7), 'compute')
  assert bound(CHIPS['h200'], {'bfloat16': 989.4e12}, 9.6e12).limit == 'memory'


@pytest.mark.parametrize(('kind', 'times'), [('all-reduce', 2), ('all-gather', 1), ('reduce-scatter', 1)])
def test_a_ring_sends_all_but_one_part(kind, times):
  found = bound(CHIPS['v5e'], {}, 0, {Collective(kind, 16, 4): 200e9})
  assert found.network == pytest.approx(times * 15 / 16)
  assert found.limit == 'network'


def test_hosts_linked_more_slowly_than_their_gpus_limit_the_network():
  """Each host of 64 B200 has eight network cards, each with 50 GB/s to other hosts."""
  within = bound(CHIPS['b200'], {}, 0, {Collective('all-reduce', 8, 1): 400e9})
  across = bound(CHIPS['b200'], {}, 0, {Collective('all-reduce', 64, 8): 400e9})
  assert within.network == pytest.approx(2 * 7 / 8 * 400 / 900)
  assert across.network == pytest.approx(2 * 7 / 8 * 400 / 8 / 50)


def test_a_group_with_one_gpu_a_host_has_one_card_a_host():
  """Parameters are split within a host, and batches over the hosts. So a group has one GPU of each host."""
  alone = bound(CHIPS['b200'], {}, 0, {Collective('all-reduce', 8, 8): 400e9})
  assert alone.network == pytest.approx(2 * 7 / 8 * 400 / 50)


def test_fast_and_slow_links_work_at_once():
  within, across = {Collective('all-gather', 8, 1): 800e9}, {Collective('all-reduce', 8, 8): 40e9}
  seconds = [bound(CHIPS['b200'], {}, 0, network).network for network in (within, across, within | across)]
  assert max(seconds[:2]) <= seconds[2] < sum(seconds[:2])


def test_one_device_needs_no_network():
  assert bound(CHIPS['h200'], {}, 0, {}).network == 0
