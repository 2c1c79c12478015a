"""Your own text: --config.data.root=FILE, or a folder whose files are joined to one text."""

from hbf.config import datasets

get_config = datasets.text_file
