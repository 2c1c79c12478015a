import itertools

import pytest

from hbf.errors import UserError
from hbf.training.durations import Clock

CLOCK = Clock(examples=1000, batch_size=64, epochs=2.5)


def test_the_run_completes_its_last_epoch():
  assert CLOCK.steps * 64 >= 2500 > (CLOCK.steps - 1) * 64


@pytest.mark.parametrize(('epochs', 'steps'), [(0.1, 10), (0.3, 30), (1.1, 110), (0.105, 11), (1e-05, 1)])
def test_a_part_of_an_epoch_has_the_steps_that_it_says(epochs, steps):
  assert Clock(examples=1000, batch_size=10, epochs=epochs).steps == steps


@pytest.mark.parametrize(
  ('duration', 'examples'),
  [('3steps', 192), ('1epoch', 1000), ('0.5epochs', 500), ('10examples', 10), ('50%', CLOCK.steps * 32)],
)
def test_units(duration, examples):
  assert CLOCK.to_examples('x', duration) == examples


def test_a_period_never_drifts():
  due = CLOCK.every('x', '1epoch')
  steps = [step for step in range(1, 64 * 1000) if due(step)]
  assert len(steps) == (64 * 1000 - 1) * 64 // 1000
  assert all(step == -(-1000 * epoch // 64) for epoch, step in enumerate(steps, 1))


@pytest.mark.parametrize('duration', ['1steps', '7steps', '10examples', '100examples', '1epoch', '9epochs'])
def test_the_next_due_step_is_the_first_that_is_due(duration):
  due = CLOCK.every('x', duration)
  for step in range(100):
    assert due.after(step) == next(later for later in itertools.count(step + 1) if due(later))


@pytest.mark.parametrize('start', [0, 11, 39, 40])
@pytest.mark.parametrize('most', [1, 4, 100])
def test_calls_end_wherever_an_event_is_due(start, most):
  events = [CLOCK.every('x', duration) for duration in ('7steps', '1epoch', '300examples')]
  counts = CLOCK.calls(start, most, events)
  ends = list(itertools.accumulate(counts, initial=start))
  assert ends[-1] == CLOCK.steps == 40
  assert {step for step in range(start + 1, 41) if any(due(step) for due in events)} <= set(ends)
  for end, count in zip(ends[1:], counts, strict=True):
    assert count == most or (0 < count < most and (end == 40 or any(due(end) for due in events)))


@pytest.mark.parametrize('duration', ['', '5', 'epoch', '-1steps', '3 weeks', '0steps'])
def test_what_is_no_period_is_refused_by_name(duration):
  with pytest.raises(UserError, match=r'log\.every'):
    CLOCK.every('log.every', duration)


@pytest.mark.parametrize(('examples', 'batch_size'), [(45_000, 256), (1_797, 64), (1_003_854, 12), (7, 7)])
def test_a_number_of_steps_as_epochs_is_as_many_steps(examples, batch_size):
  clock = Clock(examples, batch_size, 1.0)
  for steps in (1, 2, 99, 3519, 123_457):
    assert Clock(examples, batch_size, clock.epochs_of(steps)).steps == steps
