"""Data as a set of named environments.

An :class:`Environments` knows the names and what each is for (train, validate, test), and makes one environment's
data when it is asked for it: in the process that owns that environment. From arrays, from a folder, or from a
generator; :class:`BatchStream` draws the batches. :func:`image_dataset` reads MNIST, CIFAR-10 or a folder of images.
"""

from concord.environments.batches import BatchStream
from concord.environments.collection import Environment, Environments, HeldOut, split_held_out
from concord.environments.folder_environments import from_folder
from concord.environments.images import ImageDataset, LabelledImages, image_dataset, shuffle_labels
from concord.environments.source import ExampleSource, InMemory, Switching

__all__ = [
    "BatchStream",
    "Environment",
    "Environments",
    "ExampleSource",
    "HeldOut",
    "ImageDataset",
    "InMemory",
    "LabelledImages",
    "Switching",
    "from_folder",
    "image_dataset",
    "shuffle_labels",
    "split_held_out",
]
