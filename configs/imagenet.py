"""ImageNet (ILSVRC 2012), prepared by TFDS."""

from hbf.config import datasets

get_config = datasets.imagenet
