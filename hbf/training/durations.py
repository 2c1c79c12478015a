"""Durations in steps, epochs, examples or percent of the run."""

import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from typing import Protocol

from hbf.errors import UserError
from hbf.options import DURATION_PATTERN


@dataclasses.dataclass(frozen=True)
class Clock:
  """The length of a run in steps, epochs and examples.

  Attributes:
    examples: the number of examples in the training split. An epoch has this number of examples.
    batch_size: the number of examples in a step.
    epochs: the length of the run in epochs, which may be a fraction.
  """

  examples: int
  batch_size: int
  epochs: float

  @property
  def steps(self) -> int:
    """The number of steps of the run, rounded up to a whole number."""
    total = Fraction(str(self.epochs)) * self.examples  # 0.1 means 1/10, not the nearest binary number
    return -(-total.numerator // (total.denominator * self.batch_size))

  def epochs_of(self, steps: int) -> float:
    """Return the number of epochs, rounded to few decimals, with which a run has exactly `steps` steps."""
    # Rounded down, by less than a tenth of a step: `steps` rounds up.
    scale = 10 ** (len(str(self.examples // self.batch_size)) + 1)
    return (steps * self.batch_size * scale // self.examples) / scale

  def epoch(self, step: int) -> float:
    """Return the number of epochs that are done after `step` steps, which may be a fraction."""
    return step * self.batch_size / self.examples

  def to_examples(self, what: str, duration: str) -> Fraction:
    """Return the number of examples in a duration such as '50steps', '1epoch', '0.5epochs', '10000examples' or '5%'.

    Args:
      what: the config key of the duration, for messages.
      duration: the duration, as a text.

    Raises:
      UserError: the text is not a duration.
    """
    match = DURATION_PATTERN.fullmatch(duration)
    if not match:
      raise UserError(f"{what}: {duration!r} isn't a duration; write 500steps, 1epoch, 10000examples or 5%")
    unit = {
      'step': Fraction(self.batch_size),
      'epoch': Fraction(self.examples),
      'example': Fraction(1),
      '%': Fraction(self.steps * self.batch_size, 100),
    }[match[2].rstrip('s')]
    return Fraction(match[1]) * unit

  def to_steps(self, what: str, duration: str) -> int:
    """Return the number of steps in a duration, rounded to the nearest integer. See `to_examples`."""
    return round(self.to_examples(what, duration) / self.batch_size)

  def every(self, what: str, duration: str) -> 'Every':
    """Return the steps at which an event is due if it repeats after each `duration`. See `to_examples`.

    Raises:
      UserError: the text is not a duration, or the duration is zero.
    """
    period = self.to_examples(what, duration)
    if not period:
      raise UserError(f'{what}: a period must be longer than {duration}')
    return Every(period, self.batch_size)

  def calls(self, start: int, most: int, events: Iterable['Event']) -> list[int]:
    """Split the run's steps after `start` into calls of the compiled program. Return the number of steps of each.

    Args:
      start: the number of steps taken so far.
      most: the largest number of steps in a call.
      events: a call ends after each step at which one of these events is due.
    """
    counts, stop, events = [], self.steps, tuple(events)
    while start < stop:
      counts.append(min(start + most, stop, *(event.after(start) for event in events)) - start)
      start += counts[-1]
    return counts


class Event(Protocol):
  """Something that is due at some steps."""

  def after(self, step: int) -> int:
    """Return the first step after `step` at which the event is due."""


@dataclasses.dataclass(frozen=True)
class Every:
  """The steps at which a repeated event is due: those in which a period ends. A period may have 2.5 steps.

  Attributes:
    period: the length of a period in examples.
    batch_size: the number of examples in a step.
  """

  period: Fraction
  batch_size: int

  def __call__(self, step: int) -> bool:
    """Return True if a period ends within this step. The first step is step 1."""
    return self.after(step - 1) == step

  def after(self, step: int) -> int:
    """Return the first step after `step` within which a period ends."""
    # In integers, because a run asks this for each call of its program.
    top, bottom = self.period.numerator, self.period.denominator
    complete = step * self.batch_size * bottom // top
    return -(-(complete + 1) * top // (bottom * self.batch_size))
