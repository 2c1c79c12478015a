"""Names of networks in tables and pictures."""

_NAMES = {'hyperbf': 'HyperBF', 'vit': 'ViT'}


def network_name(model: str) -> str:
  """Return a network's name for tables and pictures. `model` is the network's name in a config."""
  return _NAMES.get(model, model)
