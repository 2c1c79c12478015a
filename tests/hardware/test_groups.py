"""Tests of device groups in all of XLA's notations."""

import pytest

from hbf.hardware.groups import first_group


@pytest.mark.parametrize(
  ('attributes', 'group'),
  [
    ('channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add', (0, 4)),
    ('replica_groups={{0,1,2,3,4,5,6,7}}', tuple(range(8))),
    ('replica_groups={}, to_apply=%add', tuple(range(8))),
    ('to_apply=%add', tuple(range(8))),
    ('replica_groups=[2,4]<=[8], dimensions={0}', (0, 1, 2, 3)),
    ('replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}', (0, 4)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true", (0, 1, 2, 3)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, dimensions={2}", (0, 2, 4, 6)),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", (7, 3)),
    ('source_target_pairs={{0,2},{2,4},{4,6},{6,0}}, channel_id=3', (0, 2, 4, 6)),
  ],
)
def test_the_first_group(attributes, group):
  assert first_group(attributes, 8) == group


def test_a_form_that_is_not_known_is_not_guessed():
  with pytest.raises(ValueError, match='unknown form of device groups'):
    first_group('replica_groups=ring(8), to_apply=%add', 8)
