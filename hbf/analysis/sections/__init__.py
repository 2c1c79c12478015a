"""The sections of the page of `python -m hbf explain`: each a function of a run, and of what others have found."""
