"""The traits of a stage: everything that other code has to know about it beside its options."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class StageTraits:
  """The declaration of a stage, in its class variable `traits`. A stage that declares none has the defaults.

  Attributes:
    units: name of the option that counts the units of the stage. None if the stage has no units.
    unit_share: units of the stage for each unit of the block.
    masks: the attention masks that a stage 1 accepts: 'any', 'keys' (masks that hide a token from all others alike)
      or 'none'.
    causal: True if a stage 1 can restrict a token to itself and the tokens before it.
    decodes: True if a stage 1 keeps earlier tokens in a cache (`hbf.nn.cache`), so a text can be continued.
  """

  units: str | None = None
  unit_share: float = 1.0
  masks: str = 'none'
  causal: bool = False
  decodes: bool = False


def traits_of(stage: Any) -> StageTraits:
  """Return the traits of a stage, a module or its class. No stage (None) has the defaults."""
  return getattr(stage, 'traits', StageTraits())
