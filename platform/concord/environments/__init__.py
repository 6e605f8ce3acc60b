"""Data as a set of named environments.

An :class:`Environments` knows the names and what each is for (train, validate, test), and makes one environment's
data when it is asked for it: in the process that owns that environment. From arrays, from a folder, or from a
generator; :class:`BatchStream` draws the batches. :func:`image_dataset` reads MNIST, CIFAR-10 or a folder of images.
"""

from concord.environments.batches import BatchStream
from concord.environments.coded_domains import CodedDomains
from concord.environments.collection import Environment, Environments, HeldOut, split_held_out
from concord.environments.colored_mnist import ColoredMNIST
from concord.environments.folder import from_folder
from concord.environments.images import ImageDataset, LabelledImages, image_dataset, shuffle_labels
from concord.environments.linear_example import linear_example
from concord.environments.punctuated_sst2 import SST2, PunctuatedSST2
from concord.environments.source import ExampleSource, InMemory, Switching
from concord.environments.spirals import Spirals
from concord.environments.spurious_column import SpuriousColumn
from concord.environments.table import from_table

__all__ = [
    "SST2",
    "BatchStream",
    "CodedDomains",
    "ColoredMNIST",
    "Environment",
    "Environments",
    "ExampleSource",
    "HeldOut",
    "ImageDataset",
    "InMemory",
    "LabelledImages",
    "PunctuatedSST2",
    "Spirals",
    "SpuriousColumn",
    "Switching",
    "from_folder",
    "from_table",
    "image_dataset",
    "linear_example",
    "shuffle_labels",
    "split_held_out",
]
